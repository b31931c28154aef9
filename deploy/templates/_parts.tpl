{{- define "labels" -}}
app.kubernetes.io/name: prime-node
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pod" }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "container" }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "role" }}
{{- $ := .root }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels: {{ include "labels" $ | nindent 4 }}
spec:
  replicas: 1
  strategy: {type: Recreate}
  selector:
    matchLabels: {{ include "labels" $ | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  template:
    metadata:
      labels: {{ include "labels" $ | nindent 8 }}
        app.kubernetes.io/component: {{ .name }}
    spec:
      terminationGracePeriodSeconds: {{ .grace }}
      {{- include "pod" (dict "user" 10001) | nindent 6 }}
      {{- if eq $.Values.storage.accessMode "ReadWriteOnce" }}
      affinity:
        podAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels: {{ include "labels" $ | nindent 18 }}
                  app.kubernetes.io/component: coordinator
      {{- end }}
      initContainers:
        - name: run
          image: {{ $.Values.image | quote }}
          imagePullPolicy: {{ $.Values.imagePullPolicy }}
          {{- include "container" . | nindent 10 }}
          {{- if eq .name "coordinator" }}
          command: [sh, -c]
          args:
            - |
              test -e /data/run/run.json && exit
              config=/config/run.toml
              test -s $config || config=$(python -c 'import prime_node; print(prime_node.__path__[0])')/_configs/demo.toml
              exec prime-node new /data/run --config "$config" --url "$RUN_URL"
          env:
            - {name: RUN_URL, value: {{ $.Values.newRun.url | quote }}}
          {{- else }}
          command: [sh, -c, "until test -e /data/run/run.json; do sleep 2; done"]
          {{- end }}
          volumeMounts: &mounts
            - {name: run, mountPath: /data}
            - {name: tmp, mountPath: /tmp}
            {{- if eq .name "coordinator" }}
            - {name: config, mountPath: /config, readOnly: true}
            {{- end }}
      containers:
        - name: {{ .name }}
          image: {{ $.Values.image | quote }}
          imagePullPolicy: {{ $.Values.imagePullPolicy }}
          {{- include "container" . | nindent 10 }}
          args:
            - {{ .name }}
            - /data/run
            {{- if eq .name "coordinator" }}
            - --set
            - coordinator.host=0.0.0.0
            {{- end }}
            {{- range .values.set }}
            - --set
            - {{ . | quote }}
            {{- end }}
          {{- with .values.secrets }}
          envFrom:
            {{- range . }}
            - secretRef: {name: {{ . | quote }}}
            {{- end }}
          {{- end }}
          {{- if eq .name "coordinator" }}
          ports:
            - {name: http, containerPort: 8400}
          startupProbe: {httpGet: {path: /healthz, port: http}, periodSeconds: 5, failureThreshold: 60}
          livenessProbe: {httpGet: {path: /healthz, port: http}, periodSeconds: 30, timeoutSeconds: 5}
          readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 10, timeoutSeconds: 5}
          {{- end }}
          resources: {{ toYaml .values.resources | nindent 12 }}
          volumeMounts: *mounts
      volumes:
        - name: run
          persistentVolumeClaim: {claimName: run}
        - name: tmp
          emptyDir: {}
        {{- if eq .name "coordinator" }}
        - name: config
          configMap: {name: run-config}
        {{- end }}
{{- end }}

{{- define "claim" }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
  labels: {{ include "labels" .root | nindent 4 }}
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: [{{ .mode }}]
  {{- with .root.Values.storage.className }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources: {requests: {storage: {{ .size }}}}
{{- end }}
