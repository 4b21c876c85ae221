"""What one pass looks at: objects of the cluster, as typed values. Nothing here decides or does I/O."""
