{{- define "headgate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names. 40 characters leave room for suffixes, also those of Kubernetes. */}}
{{- define "headgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "headgate.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "headgate.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/*
Labels that never change: selectors of Deployments cannot be changed, and the policies of jobs let the operator in by
its name (k8s/objects.py, Settings).
*/}}
{{- define "headgate.selector" -}}
app.kubernetes.io/name: headgate-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "headgate.labels" -}}
{{ include "headgate.selector" . }}
app.kubernetes.io/part-of: headgate
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headgate.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "headgate.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "headgate.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Namespaces of jobs in which the chart itself makes objects. */}}
{{- define "headgate.jobNamespaces" -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | uniq | toJson -}}
{{- end -}}

{{/* What is null is left to the cluster. */}}
{{- define "headgate.podSecurity" -}}
{{- $set := dict -}}
{{- range $name, $value := .Values.podSecurityContext }}
{{- if not (kindIs "invalid" $value) }}
{{- $_ := set $set $name $value }}
{{- end }}
{{- end }}
{{- toYaml $set }}
{{- end -}}

{{- define "headgate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Whether the resources of the Prometheus operator exist: "true" or nothing. */}}
{{- define "headgate.hasMonitoring" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}true{{- end -}}
{{- end -}}
