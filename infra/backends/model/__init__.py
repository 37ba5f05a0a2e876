"""Trainer backends: a model, its optimizer and its arithmetic behind one protocol."""
