"""The contract between tidemill and its brokers: calls, requests, replies, features."""
