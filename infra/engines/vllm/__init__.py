"""Generation with vLLM, on GPUs and CPUs."""
