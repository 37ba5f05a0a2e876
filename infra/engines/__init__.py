"""Generation engines behind one stepped protocol; the rule: a token's label and logprob are of the weights and distribution it came from.

`base` is the contract and needs no torch, `registry` names the engines. `toy` is the light twin, `transformers` draws from any Hugging Face
causal LM, one group at a time and bit for bit the same; `vllm` draws many side by side and takes new weights between any two steps.
"""
