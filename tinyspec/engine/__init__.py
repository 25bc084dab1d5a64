"""The engine: requests in, steps, committed tokens out."""
