{{- define "millrace.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "millrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "millrace.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "millrace.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "millrace.claim" -}}
{{- .Values.persistence.existingClaim | default (printf "home-%s-0" (include "millrace.fullname" .)) -}}
{{- end -}}

{{- define "millrace.auth" -}}
{{- $serve := .Values.settings.serve | default dict -}}
{{- $auth := toString ($serve.auth | default "keys") -}}
{{- if and (hasKey $serve "auth") (kindIs "bool" $serve.auth) -}}{{- $auth = "off" -}}{{- end -}}
{{- if and (eq $auth "keys") (not .Values.keys.existingSecret) -}}
{{- fail "keys.existingSecret is empty: the server listens beyond its own pod only with keys. make a Secret with keys.json (docs/guide/kubernetes.md), or set settings.serve.auth to \"off\" if a proxy before it authenticates requests" -}}
{{- end -}}
{{- $auth -}}
{{- end -}}

{{/* Seconds that the server may take to stop: its drain, its engine, sealing, and the pause before. */}}
{{- define "millrace.stopSeconds" -}}
{{- $serve := .Values.settings.serve | default dict -}}
{{- $engine := $serve.engine | default dict -}}
{{- add (ceil ($serve.drain_timeout_s | default 20)) (ceil ($engine.stop_timeout_s | default 15)) 55 -}}
{{- end -}}

{{/* millrace.yaml: the settings given, what the chart knows better, and that each pod has GPUs of its own. */}}
{{- define "millrace.settings" -}}
{{- $name := include "millrace.fullname" . -}}
{{- $given := deepCopy .Values.settings -}}
{{- $asked := ($given.serve | default dict).allowed_hosts | default list -}}
{{- $hosts := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- $serve := dict "host" "0.0.0.0" "port" 8000 "keys" "keys.json" "allowed_hosts" (concat $asked $hosts) -}}
{{- $own := dict "home" "/var/lib/millrace/home" "serve" $serve "schedule" (dict "metrics" (dict "host" "0.0.0.0" "port" 9201)) -}}
{{- mergeOverwrite (dict "devices" (dict "use" "any")) $given $own | toYaml -}}
{{- end -}}

{{- define "millrace.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "millrace.mounts" -}}
- {name: home, mountPath: /var/lib/millrace}
- {name: settings, mountPath: /etc/millrace, readOnly: true}
{{- if .Values.keys.existingSecret }}
- {name: keys, mountPath: /etc/millrace-keys, readOnly: true}
{{- end }}
- {name: cache, mountPath: /var/cache/millrace}
- {name: temporary, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All but the home. */}}
{{- define "millrace.volumes" -}}
- name: settings
  configMap:
    name: {{ include "millrace.fullname" . }}
{{- with .Values.keys.existingSecret }}
- name: keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: keys.json, path: keys.json}
{{- end }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
- name: temporary
  emptyDir:
    sizeLimit: {{ .Values.temporary.sizeLimit }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory.sizeLimit }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
