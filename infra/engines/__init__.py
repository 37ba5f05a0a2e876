"""Generation engines behind one stepped protocol.

`toy` needs no model. `transformers` runs any Hugging Face causal LM, one group at a time and reproducibly bit for bit. `vllm` runs many
groups concurrently and loads new weights between any two steps.
"""
