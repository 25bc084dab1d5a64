"""OpenAI's API over HTTP: a server, and a probe of any server."""
