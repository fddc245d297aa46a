"""Communication: collectives between workers, and gossip on top of them."""
