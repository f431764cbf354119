"""Where processes run: this machine, for now (`composer_jax.fleet.local`)."""
