"""Requests and responses of the HTTP interface as plain functions, without a server."""
