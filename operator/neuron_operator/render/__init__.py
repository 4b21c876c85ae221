"""Pure builders of Kubernetes objects: replicas, Jobs, Services, configuration."""
