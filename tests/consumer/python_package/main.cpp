#include <kvprism/spec/spec_registry.h>

int main() { return kvprism::SpecRegistry::builtin().find("full_attention") == nullptr ? 1 : 0; }
