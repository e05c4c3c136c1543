"""Device code and its launchers; the only package that imports triton."""
