// Python's block rows, hashes and buffers as spans: read once, into arrays that are used again.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/error.h"
#include "kvprism/base/ids.h"
#include "kvprism/key/key_schema.h"
#include "kvprism/run/instant.h"
#include "kvprism/store/store_scheduler.h"

namespace kvprism::bindings {

namespace nb = nanobind;

// The buffer of an object for as long as this lives. Not contiguous buffers are refused, but for
// one dimension.
class BufferView {
 public:
  // Throws Error (kInvalidArgument) with path `path`.
  BufferView(nb::handle object, const std::string& path);
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  static bool offered_by(nb::handle object) noexcept {
    return PyObject_CheckBuffer(object.ptr()) != 0;
  }

  int dimensions() const noexcept { return view_.ndim; }
  std::size_t shape(int dimension) const noexcept {
    return static_cast<std::size_t>(view_.shape[dimension]);
  }
  std::ptrdiff_t stride() const noexcept { return view_.strides[0]; }
  std::size_t item_bytes() const noexcept { return static_cast<std::size_t>(view_.itemsize); }
  // 'i' signed, 'u' unsigned, 'S' bytes, 'x' anything else.
  char kind() const noexcept;
  bool contiguous() const noexcept;
  const std::byte* data() const noexcept { return static_cast<const std::byte*>(view_.buf); }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(view_.len); }
  std::string describe() const;

 private:
  Py_buffer view_{};
};

// Bytes of an encoded plan or report at an address that suits the decoder.
// Ownership: keeps the object's buffer, or a copy when the address does not suit.
class EncodedBytes {
 public:
  EncodedBytes(nb::handle object, const std::string& path);
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  BufferView view_;
  std::vector<std::uint64_t> aligned_;
  std::span<const std::byte> bytes_;
};

// Appends integers of a list, a tuple, an array of any integer type, or bytes that hold native
// 32-bit integers. Throws Error (kInvalidArgument) naming the element.
void append_tokens(nb::handle tokens, const std::string& path, std::vector<std::uint32_t>& out);

// Chunks [first, end) of a row.
struct RowRange {
  std::size_t first = 0;
  std::size_t end = 0;
};

// Block tables, a row per group. Ownership: value; its view holds until the next read. Threads: one
// at a time.
class BlockRowsReader {
 public:
  BlockRows read(nb::handle rows);
  // Reads of row g only ranges[g], of rows beyond `ranges` nothing: the cost follows what a job
  // moves. The other entries of the view have no meaning.
  BlockRows read(nb::handle rows, std::span<const RowRange> ranges);
  // Ids taken from Python so far.
  std::uint64_t ids_read() const noexcept { return ids_read_; }

 private:
  // Reads rows[g] up to the longest range that `range_of` may give.
  template <class RangeOf>
  BlockRows read_ranges(nb::handle rows, const RangeOf& range_of);

  std::uint64_t ids_read_ = 0;
  std::vector<BlockId> ids_;  // never shrinks: unread entries are not even cleared
  std::vector<std::size_t> ends_;
  std::vector<std::span<const BlockId>> rows_;
};

// Hashes as a list of bytes, an array of shape [count, width], an array of items of 16 to 64 bytes,
// or flat bytes of `flat_width` a hash. Ownership: value; its view holds until the next read.
// Threads: one at a time.
class HashListReader {
 public:
  // Of the first `known` hashes, which the scheduler has, only the last is read.
  HashList read(nb::handle hashes, std::uint32_t known, std::uint32_t flat_width);

 private:
  HashList read_sequence(nb::handle hashes, std::uint32_t known);
  HashList read_buffer(nb::handle hashes, std::uint32_t known, std::uint32_t flat_width);

  std::vector<std::uint8_t> bytes_;
};

// A length of time in seconds as Python gives it; throws Error (kInvalidArgument) unless it is 0 or
// more.
Duration to_duration(double seconds, const char* path);
// Adds the problem to `problems` instead, and goes on with a second.
Duration to_duration(double seconds, const char* path, ProblemList& problems);

}  // namespace kvprism::bindings
