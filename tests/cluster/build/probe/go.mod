module neuron-serving.dev/cluster/probe

go 1.25.0
