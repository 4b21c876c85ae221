module neuron-serving.dev/cluster/pause

go 1.25.0
