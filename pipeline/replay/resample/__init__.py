"""Draw recorded samples again and compare them."""
