"""OpenAI-compatible HTTP server over one AsyncEngine, and a probe of any such server."""
