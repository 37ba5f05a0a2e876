"""Generation engines behind one stepped protocol."""
