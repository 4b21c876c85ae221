{{- define "neuron-serving.name" -}}neuron-operator{{- end }}

{{- define "neuron-serving.selector" -}}
app.kubernetes.io/name: neuron-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "neuron-serving.labels" -}}
{{ include "neuron-serving.selector" . }}
app.kubernetes.io/part-of: neuron-serving
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The labels with more, which win: a dict of root and labels. */ -}}
{{- define "neuron-serving.labelsWith" -}}
{{ merge (deepCopy .labels) (include "neuron-serving.labels" .root | fromYaml) | toYaml }}
{{- end }}

{{- define "neuron-serving.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "neuron-serving.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* What makes the pods of groups. */ -}}
{{- define "neuron-serving.groupController" -}}
{{- $served := .Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" | ternary "LeaderWorkerSet" "StatefulSet" -}}
{{- eq .Values.groups.controller "Auto" | ternary $served .Values.groups.controller -}}
{{- end }}

{{- define "neuron-serving.gatewaySelector" -}}
app.kubernetes.io/name: neuron-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "neuron-serving.gatewayLabels" -}}
{{ include "neuron-serving.labelsWith" (dict "root" . "labels" (include "neuron-serving.gatewaySelector" . | fromYaml)) }}
{{- end }}

{{- /* Who may call models: the peers of the values, and the gateway. */ -}}
{{- define "neuron-serving.ingressFrom" -}}
{{- $peers := .Values.networkPolicy.ingressFrom -}}
{{- if and $peers .Values.gateway.enabled -}}
{{- $peers = append $peers (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace)) "podSelector" (dict "matchLabels" (include "neuron-serving.gatewaySelector" . | fromYaml))) -}}
{{- end -}}
{{- toJson $peers -}}
{{- end }}
