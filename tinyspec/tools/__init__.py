"""Tools on top of the engine: audit, doctor, demo."""
