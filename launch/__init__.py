"""Thin absl mains; `main(config, workdir)` gets everything it needs."""
