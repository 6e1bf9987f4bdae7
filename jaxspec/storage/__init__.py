"""Arrays on disk: checkpoints, the cache, and digests."""
