"""Activities: classes with what they need injected, thin over store/ and pipeline/. Each may run twice."""
