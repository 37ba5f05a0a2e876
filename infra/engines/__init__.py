"""Generation engines behind one stepped protocol; the rule: a token's label and logprob are of the weights and distribution it came from.

`requests` is the contract and needs no torch; `toy_engine` is its light twin; `transformers_engine` draws from any Hugging Face causal LM,
one group at a time and bit for bit the same; `vllm_engine` draws many side by side and takes new weights between any two steps.
"""
