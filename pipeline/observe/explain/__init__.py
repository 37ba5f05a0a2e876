"""The life of one prompt, or of one refused record, told from a run's topics alone"""
