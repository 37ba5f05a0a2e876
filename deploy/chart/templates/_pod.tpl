{{- define "penstock.run" -}}{{ .Values.run.id | default .Release.Name }}{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
penstock/run: {{ include "penstock.run" .root | quote }}
{{- end -}}

{{- define "penstock.object-labels" -}}
{{ include "penstock.labels" . }}
helm.sh/chart: penstock-{{ .root.Chart.Version }}
{{- with .root.Values.queue }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* The pod of a role: `root`, `name` of the role, `args` of the command line. */ -}}
{{- define "penstock.pod" -}}
{{- $v := .root.Values }}{{ $role := index $v.roles .name }}{{ $run := include "penstock.run" .root }}{{ $worker := ne .name "launcher" -}}
metadata:
  labels: {{- include "penstock.labels" . | nindent 4 }}
  annotations:
    penstock/files: {{ toJson (list $v.run.config $v.run.files) | sha256sum | quote }}
    {{- with $role.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  restartPolicy: {{ $worker | ternary "Always" "Never" }}
  terminationGracePeriodSeconds: {{ int64 $role.graceSeconds }}
  securityContext: {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "serviceAccountName" }}
  {{- with index $role $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
  - name: {{ .name }}
    image: {{ get $v.images $role.image | default $role.image | quote }}
    imagePullPolicy: {{ $v.imagePullPolicy }}
    args: {{- toYaml (concat .args (list "--wait-broker" (toString (int64 $v.kafka.waitSeconds))) ($role.args | default list)) | nindent 4 }}
    env:
    - {name: HOME, value: /var/lib/penstock}
    - {name: PENSTOCK_HOME, value: /var/lib/penstock/state}
    - {name: PENSTOCK_BOOTSTRAP, value: {{ $v.kafka.bootstrap | quote }}}
    - {name: PENSTOCK_LOG_JSON, value: "1"}
    {{- if $worker }}
    - {name: PENSTOCK_HEALTH, value: "*:{{ $v.healthPort }}"}
    {{- end }}
    {{- if eq .name "scorer" }}
    - {name: PENSTOCK_SLOT, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
    {{- end }}
    {{- if $role.securitySecret }}
    - {name: PENSTOCK_SECURITY, valueFrom: {secretKeyRef: {name: {{ $role.securitySecret | quote }}, key: security}}}
    {{- else }}
    {{- $security := $v.kafka.security }}
    {{- if $v.kafka.userSecrets }}
    {{- $user := printf "%s-%s" $run .name }}
    - {name: PENSTOCK_PASSWORD, valueFrom: {secretKeyRef: {name: {{ $user }}, key: password}}}
    {{- $security = merge (dict "sasl_plain_username" $user) $security }}
    {{- end }}
    {{- with $security }}
    - {name: PENSTOCK_SECURITY, value: {{ toJson . | quote }}}
    {{- end }}
    {{- end }}
    {{- with concat $v.env ($role.env | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $worker }}
    ports: [{name: health, containerPort: {{ $v.healthPort }}}]
    # While a process imports torch and loads a model on a busy node, it answers late: only a worker that was ready once is probed for life.
    startupProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: {{ div $role.startupSeconds 5 }}}
    livenessProbe: {httpGet: {path: /livez, port: health}, periodSeconds: 20, timeoutSeconds: 15, failureThreshold: 6}
    readinessProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 10, timeoutSeconds: 10}
    {{- end }}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    resources: {{- toYaml $role.resources | nindent 6 }}
    volumeMounts:
    - {name: state, mountPath: /var/lib/penstock}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    - {name: files, mountPath: /etc/penstock, readOnly: true}
    {{- if $v.kafka.caSecret }}
    - {name: kafka-ca, mountPath: /etc/kafka, readOnly: true}
    {{- end }}
    {{- if $v.run.keySecret }}
    - {name: run-key, mountPath: /etc/penstock-key, readOnly: true}
    {{- end }}
    {{- if $v.model.claim }}
    - {name: model, mountPath: {{ $v.model.mountPath | quote }}, readOnly: true}
    {{- end }}
    {{- with $v.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  {{- if not $role.claim }}
  - {name: state, emptyDir: {}}
  {{- end }}
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory}}
  - {name: files, configMap: {name: {{ .root.Release.Name | quote }}}}
  {{- with $v.kafka.caSecret }}
  - {name: kafka-ca, secret: {secretName: {{ . | quote }}, items: [{key: ca.crt, path: ca.crt}]}}
  {{- end }}
  {{- with $v.run.keySecret }}
  - {name: run-key, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
  {{- end }}
  {{- with $v.model.claim }}
  - {name: model, persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}}
  {{- end }}
  {{- with $v.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
