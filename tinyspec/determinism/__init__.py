"""What the promise rests on: the fingerprint, the probes and their results."""
