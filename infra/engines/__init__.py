"""Generation engines behind one stepped protocol; the rule: what a sample turns out to be depends on its request and the weights alone.

`requests` is the contract and needs no torch; `toy_engine` is its light twin; `transformers_engine` draws from any Hugging Face causal LM.
"""
