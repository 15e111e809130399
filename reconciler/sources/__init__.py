"""Where knowledge of pods comes from: one module a source, each optional."""
