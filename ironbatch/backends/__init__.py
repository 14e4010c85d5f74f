"""The seam at which a runtime, a model server or an accelerator plugs in."""
