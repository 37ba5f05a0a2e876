"""The models of a backend: opened, frozen, with adapters, offloaded, and written in Hugging Face format."""
