{{/*
What the operator may do in the namespaces of its jobs. The table is k8s/permissions.py, which writes the file.
*/}}
{{- define "headgate.operatorRules" -}}
{{- $table := .Files.Get "files/permissions.yaml" | fromYaml -}}
{{- toYaml $table.jobs }}
{{- if .Values.rbac.kubeRay }}
{{ toYaml $table.kubeRay }}
{{- end }}
{{- end -}}

{{/* What the operator may do with the Lease of its leader, in its own namespace. */}}
{{- define "headgate.leaseRules" -}}
{{- $table := .Files.Get "files/permissions.yaml" | fromYaml -}}
{{- range $table.lease }}
{{- toYaml (list (merge (dict "resourceNames" (list (include "headgate.fullname" $))) .)) }}
{{- end }}
{{ toYaml $table.leaseCreation }}
{{- end -}}
