module neuron-serving.dev/cluster/kubelet-protocols

go 1.25.0

require k8s.io/kubelet v0.35.4
