//go:build tools

// Package tools names the programs that the tests build, so that go.mod and go.sum pin all of their modules.
// To move to another version: change the version of k8s.io/kubernetes and of the replaced modules in go.mod,
// and run `go mod tidy` in this directory.
package tools

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-proxy"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
