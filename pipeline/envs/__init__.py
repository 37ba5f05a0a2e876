"""What is asked and how it is judged: data sets, tokenization, rewards and the outcome of a group."""
