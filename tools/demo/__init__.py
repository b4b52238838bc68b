"""The demo: a real sentence-embedding model in f32 and in int8, compared."""
