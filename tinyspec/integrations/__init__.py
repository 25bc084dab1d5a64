"""Libraries that go round a model's forward, each served in a module that imports it."""
