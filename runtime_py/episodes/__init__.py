"""Episodes of a history: segments, clustering, routing, caches and where they are stored."""
