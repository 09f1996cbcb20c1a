"""The misdeeds, a module for each kind."""
