"""Which rows run in which pass, on which pages. Host only: no torch."""
