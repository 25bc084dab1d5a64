"""``model.generate`` of a patched model: from transformers' arguments to requests and back."""
