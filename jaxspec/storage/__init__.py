"""Arrays on disk: checkpoints, the cache, and their digests."""
