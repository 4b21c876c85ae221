"""One replica over several processes and nodes: what its ranks say to each other, how they meet and how they end."""
