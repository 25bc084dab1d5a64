"""How long a test waits for another thread."""

# Seconds. Only a thread that hangs takes so long; a busy machine must not fail a test.
PATIENCE = 600
