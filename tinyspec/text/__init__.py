"""Text: what tokens mean as text, and where stop strings end it."""
