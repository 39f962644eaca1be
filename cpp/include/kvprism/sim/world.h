// A whole deployment in virtual time from one seed: engine, scheduler, worker, store, faults, and
// judges of all of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvprism/backend/fault_injection.h"
#include "kvprism/sim/group_model.h"

namespace kvprism::sim {

// What the world itself does to the house, beside the faults of its store.
enum class WorldFault : std::uint8_t {
  kAbort,         // of a request
  kAbortLoading,  // of a request whose load is running
  kPreemption,
  kReportDelayed,  // others overtook it
  kReportDuplicated,
  kReportGarbage,
  kReportForeign,   // of an earlier engine
  kPlanForeign,     // of another digest, epoch, group, ...
  kPlanRepeated,    // one that was taken before
  kNullOffer,       // a state offered in the null block
  kShrunk,          // accepted tokens went back for a moment
  kUnknownRequest,  // calls for requests that do not exist
  kLateToken,       // a worker was pumped while a save's token had not fired
  kEvicted,         // objects dropped by the pool
  kErased,          // objects that vanished
  kUnfinished,      // objects without their writer
  kPoolFull,
  kTimeJump,
  kRestart,     // of the engine with a fresh cache
  kQuarantine,  // jobs that stayed unquiet for too long
  kDetachedLoad,
  kPartialLoad,
  kIdReused,        // a request with the id of an earlier one
  kPurge,           // begun
  kPurged,          // and done
  kObjectRemoved,   // one that was damaged, by the scheduler
  kObjectReplaced,  // and stored anew
  kDraftRejected,   // tokens of a draft model whose bytes were overwritten later
  kAnnounced,       // no fault: what the scheduler told of the store's content
  kJunction,        // no fault: a request whose windows are kept where it leaves others
  kStages,          // no fault: a world of several pipeline stages
  kBareStages,      // no fault: and some of them hold no layers of a stored group
  kVllmKeys,        // no fault: one with key schema `vllm`
  kModeChanged,     // no fault: the scheduler's mode, while it runs
  kRestricted,      // no fault: a request that may not load, or not save
  kSavesHeldUp,     // no fault: puts that waited for the bytes in flight
  kSavesHeldBack,   // no fault: saves that waited for the blocks that jobs hold
  kAvoided,         // no fault: chunks not asked for, because their load had failed
  kReplayed,        // no fault: an engine's run was repeated from its recording
  kReportLost,
  kPlanLost,        // by one rank
  kRankGone,        // a rank's process ended, and the engine ran on for a while
  kLag,             // some ranks moved and others did not
  kResumedAtOnce,   // a request that was preempted and started again in one pass (W-C5)
  kRestrictedLate,  // a request, or the mode, in the middle of its life
  kLandedAfterEnd,  // a call of an engine that had ended
  // No faults: worlds with arrangements that a part of all have.
  kContextRanks,  // decode context ranks
  kUnshared,      // and stored groups whose tokens they do not share
  kPrefillRanks,  // prefill context ranks
  kPartialHits,   // hits inside blocks
  kWrapper,       // layers of several specs in a group
  kReplicas,      // tensor ranks that share keys
  kCompressed,    // several tokens in a position
  kDoubled,       // several positions of a token
  kPadded,        // pages longer than their content
  kPacked,        // rows and bytes of a position that do not follow from heads and elements
  kExtraStates,   // tables of states with blocks for drafts and checkpoints behind them
  kKernelBlocks,  // blocks of several of the kernel's: once for each engine
  kShortWindows,  // windows of one token
  kCleanPurge,    // no fault: a purge where what is missing afterwards is a failure
  kRankReplaced,  // a rank's process ended, and another took its place at once
};
inline constexpr std::size_t kNumWorldFaults = 61;

inline constexpr std::array<std::string_view, 6> kLayouts{"LBHNC", "LBNHC", "LHBNC",
                                                          "BLHNC", "BLNHC", "BHLNC"};

// Tensor ranks and pipeline stages that worlds have.
struct Arrangement {
  std::uint32_t ranks;
  std::uint32_t stages;
};
inline constexpr std::array<Arrangement, 6> kArrangements{
    {{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {4, 1}}};

std::string_view to_string(WorldFault kind) noexcept;

struct WorldOptions {
  std::uint64_t seed = 1;
  std::uint32_t events = 1000;
  std::uint32_t trace_from = UINT32_MAX;  // the event from which on the trace is kept
  bool silent_corrupt = false;            // lets the store lie, which must be noticed
  // A kind of fault, as its to_string() has it, that is not raised: of the store, or one of
  // report lost, plan lost, rank gone, ranks lag, restricted late. "": all are.
  std::string_view without{};
};

struct WorldTotals {
  std::uint64_t events = 0;
  std::uint64_t requests = 0;
  std::uint64_t finished = 0;
  std::uint64_t aborted = 0;
  std::uint64_t computed_tokens = 0;
  std::uint64_t local_hit_tokens = 0;
  std::uint64_t external_hit_tokens = 0;
  std::uint64_t objects_checked = 0;
  std::uint64_t loads = 0;
  std::uint64_t jobs = 0;
  std::uint64_t clean_worlds = 0;  // without faults, where also what is missing is a failure
  std::array<std::uint64_t, kNumFaultKinds> faults{};
  std::array<std::uint64_t, kNumWorldFaults> world_faults{};
  // Objects that were compared with the oracle, by kind (kModelKinds) and layout.
  std::array<std::array<std::uint64_t, kLayouts.size()>, kStoredKinds> checked{};
  std::array<std::uint64_t, kArrangements.size()> arrangements{};  // worlds

  void add(const WorldTotals& other) noexcept;
};

struct WorldResult {
  bool passed = true;
  std::uint32_t failed_at = 0;  // event; beyond `events` while everything drains
  std::string invariant;        // one word, e.g. "memory"
  std::string failure;          // in words
  std::string config;           // the groups of this seed and its options, in words
  std::vector<std::string> trace;
  WorldTotals totals;
};

// Runs one seed to its end or to the first broken invariant. The same options give the same result.
// Throws Error (kInvalidArgument) for a kind that cannot be left out.
//
// What must hold after every event, by the word that WorldResult::invariant shows:
//   memory        computed and loaded bytes are the oracle's; nothing else changes but destinations
//                 of running loads; guards are whole
//   references    a block's references are those of the tables and of the jobs that may still
//                 touch it, on ranks that have not ended; a free block is poisoned
//   object        every stored object is what the text of its key says; a ring has none
//   stage         nobody asks for an object that no stage stores
//   hit           what a lookup offers was stored, is a multiple of A, leaves enough to
//                 compute; what a load names was stored
//   bypass        after a failed load a request is offered nothing more, but where a rank has ended
//   outcome       a worker tells at most one outcome of a job, names chunks where it failed in
//                 part, and tells failed and quiet of one whose plan it never got
//   quiet         and one quiet, not before the outcome; a load ends only when it is quiet, and
//                 what a put's call reads before it is quiet is still what its key says
//   load end      each promised load ends once, and one whose ranks have told in time what they
//                 lack names just that as failed, and counts on all that is whole before it
//   job id        no job is planned twice; none is reported that was not planned
//   null block    no plan names the null block
//   save range    saves are multiples of S, but for the end of a prompt
//   hole          and none begins behind a chunk that failed and was not planned again
//   purge         when a purge is done, nothing that was stored before it is in the pool; a request
//                 that had computed tokens before it saves nothing until it is preempted
//   mismatch      an object that a load found damaged is removed, of that rank and in the same
//                 event, and nothing else is; nobody who asks later is offered it before
//   avoided       nor is a chunk whose load has failed otherwise, for a while
//   mode          nothing is asked for, loaded or saved that the mode does not allow
//   access        nor by a request that may not, from the moment on that it may not
//   in flight     a put exceeds the limit on bytes in flight only alone
//   held          no save begins while jobs hold more blocks than they may
//   event         what the scheduler announces is what reports have said, or as gone what a lookup
//                 has not found, by its right name; as stored once for each save
//   replay        a recorded run repeats its decisions, in one seed of 16
//   foreign plan  plans of another digest, epoch, group or pool are refused
//   engine        no call makes nonsense of the engine's state
//   oracle        every 128 events and at the end: all that is believed, computed anew
//
// In the end:
//   object        every object in the store is still what its key says
//   drain         everything comes to its end; nothing is remembered, held or running, and what
//                 was stored or lost has been announced
//   close         a worker that closes tells an outcome of every job
//
// In worlds without faults also:
//   missed hit    a lookup finds everything that was stored when it was asked, and is refused
//                 without a question only where there is nothing to find
//   missed load   every load is complete, but for those that a purge or the end of a rank cuts off
//   not stored    what a finished request computed is in the store, up to a multiple of S, and
//                 up to the end of its prompt where hits may end inside a block; with a retention
//                 windows at its multiples, where the prompt can be replayed and where it left
//                 what others had stored (W-C19); with drafts one object behind it. Of whoever has
//                 begun, or begun again, since the last purge and the last end of a rank
WorldResult run_world(const WorldOptions& options);

}  // namespace kvprism::sim
