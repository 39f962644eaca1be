"""Native core of kvprism. Import the package kvprism instead."""

from collections.abc import Mapping, Sequence
import os
from typing import Annotated, Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


version: str = '0.1.0'

class Problem:
    """
    One thing that is wrong: where, what was found, what was expected, what to do.
    """

    @property
    def path(self) -> str:
        """Where, e.g. ``groups[1].block_size``."""

    @property
    def value(self) -> str:
        """The value as given; may be empty."""

    @property
    def expected(self) -> str:
        """What would have been right."""

    @property
    def hint(self) -> str:
        """What to do; may be empty."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Error(Exception):
    """
    Set-up or configuration failed. ``code`` is a stable word, ``problems`` every Problem of the input at once.
    """

    @property
    def code(self) -> str:
        """Stable lower-case word, e.g. ``invalid_config``."""

    @property
    def problems(self) -> list[Problem]:
        """Every problem of the input."""

class ConfigError(Error, ValueError):
    """A configuration value is malformed or contradicts another."""

class ArgumentError(Error, ValueError):
    """A call's argument is outside its contract."""

class NotFoundError(Error, LookupError):
    """A file, library, device or symbol is missing."""

class MismatchError(Error, ValueError):
    """Two sides disagree (digest, epoch, layout, version)."""

class UnsupportedError(Error, NotImplementedError):
    """Valid, but this build or backend cannot do it."""

class UnavailableError(Error, ConnectionError):
    """A service does not answer."""

class TimedOutError(Error, TimeoutError):
    """A bound was reached."""

class ClosedError(Error, ValueError):
    """Used after close(), or in a forked child."""

def take_log_lines() -> list[tuple[str, str]]:
    """
    The library's own log lines since the last call, at most the newest 1,000.

    They tell changes: a client that is replaced, saving that pauses, blocks in quarantine. The library prints nothing.

    Returns:
        Pairs of level ("debug", "info", "warning", "error") and text.
    """

def set_log_level(level: str) -> None:
    """
    Which lines `take_log_lines` gives; "warning" by default.

    Args:
        level: "debug", "info", "warning", "error" or "off".

    Raises:
        Error: No such level.
    """

class SpecRegistry:
    """The known kinds of cache. A value: adding a kind makes a new registry."""

    @staticmethod
    def builtin() -> SpecRegistry:
        """The registry of the kinds that docs/configuration.md lists."""

    def with_kind(self, *, name: str, payload: str, dcp_sharded: bool, latent: bool, prefix_cacheable: bool, hit: str, window: int | None, save: str, peer: str, replay_tokens: int, fine_grained_lookup: bool) -> SpecRegistry:
        """
        This registry and one more kind. Nothing has a default: leaving out an argument is a TypeError.

        Args:
            name: What a group's ``kind`` says; not taken yet.
            payload: What a group of it declares: ``attention`` sizes, ``state`` tensors or ``raw`` bytes.
            dcp_sharded: Whether decode context parallelism spreads its positions.
            latent: Whether it keeps one vector a position, the same on every tensor rank (MLA).
            prefix_cacheable: Whether it may enter a hash-addressed store.
            hit: Objects that make a prefix usable: ``prefix``, ``window``, ``chunk``, ``last_state`` or ``never``.
            window: Tokens of a ``window`` or ``chunk`` rule, else 0; None takes each group's own ``sliding_window`` or
                ``attention_chunk_size``.
            save: Where saved bytes come from: ``positional``, ``hand_off`` or ``never``.
            peer: What travels from prefill to decode: ``suffix``, ``window``, ``state``, ``whole`` or ``none``.
            replay_tokens: Tokens recomputed after a hit before the cache is whole again; a group may give its own.
            fine_grained_lookup: Whether hits may end inside a block.

        Raises:
            ArgumentError: A word is unknown, the name is empty or taken, or the window does not suit the hit rule.
        """

    def names(self) -> list[str]:
        """Names of all kinds, built-in ones first."""

    def __contains__(self, name: str) -> bool: ...

    def __repr__(self) -> str: ...

class GroupId:
    """Position of a group in the engine's list of all KV cache groups."""

    def __init__(self, value: int) -> None:
        """
        Wraps a position.

        Args:
            value: The position, from 0.

        Raises:
            ArgumentError: It does not fit into 32 bits.
        """

    @property
    def value(self) -> int:
        """The position as an int."""

    def __int__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __lt__(self, other: GroupId) -> bool: ...

    def __repr__(self) -> str: ...

class TransferIndex:
    """Position of a group in the transfer projection."""

    def __init__(self, value: int) -> None:
        """
        Wraps a position.

        Args:
            value: The position, from 0.

        Raises:
            ArgumentError: It does not fit into 32 bits.
        """

    @property
    def value(self) -> int:
        """The position as an int."""

    def __int__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __lt__(self, other: TransferIndex) -> bool: ...

    def __repr__(self) -> str: ...

class StoreIndex:
    """Position of a group in the store projection."""

    def __init__(self, value: int) -> None:
        """
        Wraps a position.

        Args:
            value: The position, from 0.

        Raises:
            ArgumentError: It does not fit into 32 bits.
        """

    @property
    def value(self) -> int:
        """The position as an int."""

    def __int__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __lt__(self, other: StoreIndex) -> bool: ...

    def __repr__(self) -> str: ...

class ParallelSizes:
    """Sizes of the parallel arrangement, 1 where it is absent."""

    @property
    def tp(self) -> int:
        """Tensor parallel size."""

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""

    @property
    def pcp(self) -> int:
        """Prefill context parallel size."""

    @property
    def dcp(self) -> int:
        """Decode context parallel size."""

    @property
    def world(self) -> int:
        """Number of ranks: tp x pp x pcp."""

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class CacheConfig:
    """
    What an engine tells of its cache: groups, sizes and layout. Its JSON form is described in docs/configuration.md.
    """

    @staticmethod
    def from_json(text: str, registry: SpecRegistry | None = None) -> CacheConfig:
        """
        Reads the JSON form.

        Args:
            text: A JSON object.
            registry: Known kinds; None for the built-in ones.

        Raises:
            ConfigError: With every problem at once.
        """

    @staticmethod
    def from_file(path: str | os.PathLike[str], registry: SpecRegistry | None = None) -> CacheConfig:
        """
        Reads a file in the JSON form.

        Args:
            path: A file; every error names it.
            registry: Known kinds; None for the built-in ones.

        Raises:
            NotFoundError: There is no such file, or it cannot be read.
            ConfigError: With every problem at once.
        """

    @staticmethod
    def from_dict(value: dict[str, Any], registry: SpecRegistry | None = None) -> CacheConfig:
        """
        Reads a dict of the same shape as the JSON form.

        Args:
            value: What ``json.loads`` of the JSON form would give.
            registry: Known kinds; None for the built-in ones.

        Raises:
            ConfigError: With every problem at once.
        """

    def to_json(self) -> str:
        """The JSON form, with every key written out."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as a dict."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, with the null block."""

    @property
    def kv_layout(self) -> str:
        """Physical order of layer, block, head, token and content."""

    @property
    def parallel(self) -> ParallelSizes:
        """Sizes of the parallel arrangement."""

    @property
    def scheduler_block_size(self) -> int | None:
        """The engine's own value in tokens, or None."""

    @property
    def hash_block_size(self) -> int | None:
        """The engine's own value in tokens, or None."""

    @property
    def cache_hit_alignment_tokens(self) -> int | None:
        """The engine's own value in tokens, or None."""

    @property
    def prefix_cache_retention_interval(self) -> int | None:
        """Tokens between prefixes that stay cached, or None."""

    @property
    def use_eagle(self) -> bool | None:
        """Whether a draft model drops the last block of a hit, or None."""

    @property
    def model_total_kv_heads(self) -> int | None:
        """KV heads of the model as the engine counts them, or None."""

    @property
    def key_schema(self) -> str:
        """Name of the key schema."""

    @property
    def namespace(self) -> str:
        """Tenant; part of every key."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class Group:
    """One group after resolution; a row of a projection."""

    @property
    def id(self) -> GroupId:
        """Position among all groups."""

    @property
    def transfer_index(self) -> TransferIndex | None:
        """Position in the transfer projection, or None."""

    @property
    def store_index(self) -> StoreIndex | None:
        """Position in the store projection, or None."""

    @property
    def why_not_stored(self) -> str:
        """Why the group is not storable; empty when it is."""

    @property
    def kind(self) -> str:
        """Name of the kind of cache."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers on this rank."""

    @property
    def block_size(self) -> int:
        """Stored positions per block and rank."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens that one block id stands for."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of the first layer on this rank."""

    @property
    def layer_kinds(self) -> list[str]:
        """
        Kind of each layer; one and the same unless a uniform wrapper held them.
        """

    @property
    def layer_page_bytes(self) -> list[int]:
        """Bytes of one block of each layer on this rank."""

    @property
    def object_bytes(self) -> int:
        """Bytes of one block of all layers of this rank: one object in a store."""

    @property
    def tp_replicated(self) -> bool:
        """Whether every tensor rank holds the same bytes."""

    @property
    def prefix_cacheable(self) -> bool:
        """Whether its kind may enter a hash-addressed store."""

    @property
    def hit(self) -> str:
        """Hit rule."""

    @property
    def window(self) -> int:
        """Tokens of the hit rule's window, or 0."""

    @property
    def save(self) -> str:
        """Save rule."""

    @property
    def peer(self) -> str:
        """Peer rule."""

    @property
    def replay_tokens(self) -> int:
        """Tokens recomputed after a hit before the cache is whole again."""

    @property
    def fine_grained_lookup(self) -> bool:
        """Whether hits may end inside a block."""

    @property
    def enable_kv_transfer(self) -> bool:
        """Whether the engine lets it be transferred."""

    @property
    def is_eagle_group(self) -> bool:
        """Whether the draft model makes a hit drop its last block."""

    @property
    def host_resident(self) -> bool:
        """Whether it lives in host memory."""

    @property
    def role(self) -> str:
        """The engine's word for its role."""

    @property
    def stages(self) -> list[int]:
        """Pipeline stages that hold layers of it, ascending."""

    def __repr__(self) -> str: ...

class Projection:
    """
    Splits groups once: all >= transfer >= store, each in the engine's order. Immutable; any thread may use it.
    """

    def __init__(self, config: CacheConfig, registry: SpecRegistry | None = None) -> None:
        """
        Resolves a config.

        Args:
            config: The engine's groups.
            registry: Known kinds; None for the built-in ones.

        Raises:
            ConfigError: With every problem at once.
        """

    @staticmethod
    def check(config: CacheConfig, registry: SpecRegistry | None = None) -> list[Problem]:
        """
        What is wrong with a config, without raising.

        Args:
            config: What the engine told.
            registry: The kinds of cache; None for the built-in ones.

        Returns:
            Every problem; an empty list when there is none.
        """

    @property
    def num_groups(self) -> int:
        """Number of all groups."""

    @property
    def num_transfer_groups(self) -> int:
        """Number of transferable groups."""

    @property
    def num_store_groups(self) -> int:
        """Number of storable groups."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, with the null block."""

    @property
    def kv_layout(self) -> str:
        """Name of the layout."""

    @property
    def key_schema(self) -> str:
        """Name of the key schema."""

    @property
    def namespace(self) -> str:
        """Tenant; part of every key."""

    @property
    def parallel(self) -> ParallelSizes:
        """Sizes of the parallel arrangement."""

    @property
    def scheduler_block_size(self) -> int:
        """S: requests are saved in steps of so many tokens."""

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""

    @property
    def hit_alignment(self) -> int:
        """Hits end on multiples of it, in tokens."""

    @property
    def retention_interval(self) -> int | None:
        """The engine's retention interval in tokens, or None."""

    @property
    def model_total_kv_heads(self) -> int | None:
        """KV heads of the model as the engine counts them, or None."""

    @property
    def replay_tokens(self) -> int:
        """Tokens that stay to be computed after a hit, at least 1."""

    def max_hit(self, prompt_tokens: int) -> int:
        """The longest hit that a prompt may have, in tokens."""

    @property
    def transfer_group_ids(self) -> list[GroupId]:
        """Ids of the transferable groups, in TransferIndex order."""

    @property
    def store_group_ids(self) -> list[GroupId]:
        """Ids of the storable groups, in StoreIndex order."""

    def groups(self) -> list[Group]:
        """A row for each group, in GroupId order."""

    @overload
    def group(self, index: GroupId) -> Group:
        """
        The row of a group, found by any of its three indices.

        Args:
            index: One of them.

        Raises:
            IndexError: There is no such group.
        """

    @overload
    def group(self, index: TransferIndex) -> Group: ...

    @overload
    def group(self, index: StoreIndex) -> Group: ...

    @overload
    def group_id(self, index: TransferIndex) -> GroupId:
        """
        The engine's id of a group in a projection.

        Args:
            index: Its position there.

        Raises:
            IndexError: There is no such group.
        """

    @overload
    def group_id(self, index: StoreIndex) -> GroupId: ...

    def transfer_index(self, id: GroupId) -> TransferIndex | None:
        """
        Position in the transfer projection; None means: skip the group, never shift.

        Args:
            id: The engine's id.

        Raises:
            IndexError: There is no such group.
        """

    def store_index(self, id: GroupId) -> StoreIndex | None:
        """
        Position in the store projection; None means: skip the group, never shift.

        Args:
            id: The engine's id.

        Raises:
            IndexError: There is no such group.
        """

    def why_not_stored(self, id: GroupId) -> str:
        """
        Why a group is not storable; empty when it is.

        Args:
            id: The engine's id.

        Raises:
            IndexError: There is no such group.
        """

    @property
    def digest(self) -> str:
        """32 hex digits over what every rank must see alike."""

    @property
    def digest_facts(self) -> list[tuple[str, str]]:
        """What the digest covers, as (name, value)."""

    @staticmethod
    def describe_mismatch(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> str:
        """
        A table of both sides' facts with the differing rows marked.

        Args:
            ours: ``digest_facts`` of this side.
            theirs: ``digest_facts`` of the other.

        Returns:
            Text of several lines.
        """

    def __repr__(self) -> str: ...

def validate_store(projection: Projection) -> list[Problem]:
    """
    Every reason why a projection cannot be used with a store; an empty list when it can.
    """

def validate_peer(projection: Projection) -> list[Problem]:
    """
    Every reason why a projection cannot be used with a peer; an empty list when it can.
    """

class BlockHasher:
    """
    Makes block hashes, digest for digest those of vLLM. One thread at a time.
    """

    def __init__(self, algorithm: str = 'sha256_cbor', *, hash_block_size: int, seed: str | None = None) -> None:
        """
        Prepares an algorithm.

        Args:
            algorithm: ``sha256_cbor``, or ``xxhash_cbor``, which is fast but not collision-resistant.
            hash_block_size: Tokens per hash.
            seed: What the chain begins with; vLLM takes PYTHONHASHSEED. None is vLLM's own constant for
                SHA-256, and an error for XXH3.

        Raises:
            ConfigError: With every problem at once.
        """

    @property
    def algorithm(self) -> str:
        """What a key schema calls ``hash_algorithm``."""

    @property
    def hash_block_size(self) -> int:
        """Tokens per hash."""

    @property
    def width(self) -> int:
        """Bytes of a hash."""

    @property
    def none_hash(self) -> bytes:
        """The hash of the empty prefix."""

    def hashes(self, tokens: Any, *, first: int = 0, parent: Any = b"", lora: tuple[str, str] | None = None, items: Sequence[tuple[str, int, int]] = (), cache_salt: str = "", prompt_embeds: Any = None) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The hashes of whole units, one after the other.

        Args:
            tokens: Token ids: a list, a tuple, an array of integers, or bytes of native 32-bit integers.
            first: Where in the request the tokens begin, a multiple of ``hash_block_size``.
            parent: The hash of the unit before, as bytes or a row of what this returns; empty at token 0.
            lora: Name and path of the adapter.
            items: Multimodal items as (identifier, offset, length) in tokens of the request, by offset.
            cache_salt: Keeps this request's cache apart from that of others.
            prompt_embeds: Embeddings in place of token ids, a row a token from the request's first on. Units behind the last row
                still differ from those of a request without any.

        Returns:
            Array of shape (units, ``width``).

        Raises:
            ArgumentError: With every problem at once, or because another thread is in this call.
        """

class HitGroup:
    """What a hit search knows of a group."""

    def __init__(self, *, rule: str, chunk_tokens: int, window: int = 0, draft: bool = False, unit_tokens: int = 0, family: int) -> None:
        """
        Describes a group by what its hits depend on.

        Args:
            rule: "prefix", "window", "chunk", "last_state" or "never".
            chunk_tokens: Tokens per block.
            window: Tokens of the window or attention chunk; without meaning for other rules.
            draft: Whether a hit needs one more object behind it.
            unit_tokens: Tokens between prefixes that may have an object, a divisor of `chunk_tokens`, which 0 means.
            family: Any number, equal for groups with equal specs.

        Raises:
            ArgumentError: No such rule, or a number is out of range.
        """

    @property
    def rule(self) -> str:
        """prefix, window, chunk, last_state or never."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens per block."""

    @property
    def window(self) -> int:
        """Tokens of the window or attention chunk."""

    @property
    def draft(self) -> bool:
        """Whether a hit needs one more object behind it."""

    @property
    def unit_tokens(self) -> int:
        """Tokens between prefixes that may have an object."""

    @property
    def family(self) -> int:
        """Equal for groups with equal specs."""

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class HitSearch:
    """
    The longest usable prefix over several groups, for many existence maps a call. A map has a byte for each hash of a group, the groups one after another. One call at a time: a second thread gets an ArgumentError.
    """

    def __init__(self, projection: Projection) -> None:
        """
        Searches over the stored groups.

        Args:
            projection: Its groups, step, tokens per hash and hit alignment; not kept.
        """

    @staticmethod
    def of_groups(groups: Sequence[HitGroup], *, step: int, unit: int, alignment: int) -> HitSearch:
        """
        From rules and sizes instead of a projection.

        Args:
            groups: What each group needs, in store order.
            step: Granularity of saves in tokens.
            unit: Tokens per hash.
            alignment: Tokens that hits are multiples of.

        Raises:
            ArgumentError: There is no group, or the sizes do not fit each other.
        """

    @property
    def groups(self) -> list[HitGroup]:
        """The groups in store order."""

    @property
    def step(self) -> int:
        """Tokens."""

    @property
    def unit(self) -> int:
        """Tokens per hash."""

    @property
    def alignment(self) -> int:
        """Tokens; hits are multiples."""

    def find_hits(self, maps: Any, hashes: int, *, locals: Any, probed: Any, limits: Any = None) -> list[int]:
        """
        The hit of each map in tokens.

        Args:
            maps: Bytes, one for each map, group and hash.
            hashes: Hashes of a map.
            locals: Tokens of the engine's own hit, for each map.
            probed: Tokens up to which the store was asked, for each map.
            limits: The longest hit allowed, for each map; ``probed`` when left out.

        Raises:
            ArgumentError: Sizes do not fit each other.
        """

    def find_loaded(self, maps: Any, hashes: int, *, locals: Any, hits: Any) -> list[int]:
        """
        The valid tokens of each hit when the map tells what arrived.

        Args:
            maps: Bytes, one for each map, group and hash.
            hashes: Hashes of a map.
            locals: Tokens of the engine's own hit, for each map.
            hits: Tokens of the hit that was loaded, for each map.

        Returns:
            Tokens for each map.

        Raises:
            ArgumentError: Sizes do not fit each other.
        """

    def shared_prefixes(self, maps: Any, hashes: int, *, locals: Any, probed: Any) -> list[int]:
        """
        Up to where others have stored a prompt, whatever windows and states are left of it.

        Args:
            maps: Bytes, one for each map, group and hash.
            hashes: Hashes of a map.
            locals: Tokens of the engine's own hit, for each map.
            probed: Tokens up to which the store was asked, for each map.

        Returns:
            Tokens for each map, a multiple of ``step``; 0 without a group that needs all of a prefix.

        Raises:
            ArgumentError: Sizes do not fit each other.
        """

    def tails(self, maps: Any, hashes: int, *, hits: Any) -> list[int]:
        """
        Tokens of the prefix whose object ends a hit, for each map and group; 0 for none.

        Args:
            maps: Bytes, one for each map, group and hash.
            hashes: Hashes of a map.
            hits: Tokens of the hit, for each map.

        Returns:
            Tokens for each map and group.

        Raises:
            ArgumentError: Sizes do not fit each other.
        """

    def load_ranges(self, hit: int, local: int = 0) -> list[tuple[int, int]]:
        """
        Chunks of each group that a load fetches.

        Args:
            hit: Tokens of the hit.
            local: Tokens that the engine has itself.

        Returns:
            (first, end) for each group.
        """

    def prompt_end_chunks(self, prompt_tokens: int) -> list[tuple[int, int, int]]:
        """
        What is stored for the end of a prompt beside whole steps, as (group, chunk, tokens of the prefix that names it).
        """

    def lookup_masks(self, tokens: int) -> list[bytes]:
        """
        A byte for each chunk of each group: may it serve a hit of up to `tokens`?
        """

    def store_masks(self, tokens: int, start: int = 0, *, retention: int | None, prompt_tokens: int | None = None) -> list[bytes]:
        """
        A byte for each chunk of each group from `start` on: is it worth an object?

        Args:
            tokens: Where the chunks end.
            start: Where they begin, in tokens.
            retention: The engine's retention interval in tokens; None for every prefix.
            prompt_tokens: Length of the prompt, from whose end it may be replayed.

        Returns:
            Bytes for each group.

        Raises:
            ArgumentError: A number does not fit.
        """

class RankPosition:
    """A rank's place in the parallel arrangement."""

    def __init__(self, *, tp: int = 0, pp: int = 0, pcp: int = 0, dcp: int = 0) -> None:
        """
        Names a place.

        Args:
            tp: Tensor rank, from 0.
            pp: Pipeline rank, from 0.
            pcp: Prefill context rank, from 0.
            dcp: Decode context rank, from 0.

        Raises:
            ArgumentError: A number does not fit into 32 bits.
        """

    @property
    def tp(self) -> int:
        """Tensor rank."""

    @property
    def pp(self) -> int:
        """Pipeline rank."""

    @property
    def pcp(self) -> int:
        """Prefill context rank."""

    @property
    def dcp(self) -> int:
        """Decode context rank."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class KeySchema:
    """
    Makes the names of objects for save, lookup and load alike. Immutable; any thread may use it.
    """

    @staticmethod
    def kvprism(projection: Projection, *, model: str, model_revision: str = '', kv_quantization: str = 'none', hash_algorithm: str, hash_is_stable: bool, pipeline_split: str = '') -> KeySchema:
        """
        The schema ``kvp1/<namespace>/<fingerprint>/<tp>.<pp>.<pcp>.<dcp>/<store index>/<hash>``.

        Args:
            projection: The groups.
            model: Name or path of the model; not empty.
            model_revision: Version of the weights.
            kv_quantization: How cached values are quantised, e.g. ``fp8_per_tensor``.
            hash_algorithm: The engine's block hash, e.g. ``sha256_cbor``; not empty.
            hash_is_stable: Whether every process hashes alike; False is refused.
            pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
                schema ``kvprism`` with several stages.

        Raises:
            ConfigError: With every problem at once.
        """

    @staticmethod
    def vllm(projection: Projection, *, model: str, model_revision: str = '', kv_quantization: str = 'none', hash_algorithm: str, hash_is_stable: bool, pipeline_split: str = '') -> KeySchema:
        """
        The keys of vLLM's built-in connector, byte for byte.

        They say nothing of revision, quantisation, layout or sizes: all users of the pool must agree.

        Args:
            projection: The groups.
            model: Name or path of the model; not empty.
            model_revision: Version of the weights.
            kv_quantization: How cached values are quantised.
            hash_algorithm: The engine's block hash; not empty.
            hash_is_stable: Whether every process hashes alike; False is refused.
            pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
                schema ``kvprism`` with several stages.

        Raises:
            ConfigError: With every problem at once; also where the reference's own objects are wrong.
        """

    @staticmethod
    def make(projection: Projection, *, model: str, model_revision: str = '', kv_quantization: str = 'none', hash_algorithm: str, hash_is_stable: bool, pipeline_split: str = '') -> KeySchema:
        """
        The schema that the projection names.

        Args:
            projection: The groups.
            model: Name or path of the model; not empty.
            model_revision: Version of the weights.
            kv_quantization: How cached values are quantised.
            hash_algorithm: The engine's block hash; not empty.
            hash_is_stable: Whether every process hashes alike; False is refused.
            pipeline_split: Which layers each pipeline stage holds, e.g. ``0-15,15-31``, alike on all ranks; needed by
                schema ``kvprism`` with several stages.

        Raises:
            ConfigError: With every problem at once.
        """

    @property
    def projection(self) -> Projection:
        """The groups that keys are made for."""

    @property
    def name(self) -> str:
        """Name of the schema."""

    @property
    def fingerprint(self) -> str:
        """
        32 hex digits over what gives bytes their meaning; empty for schema vllm.
        """

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What keys depend on beside ranks, group and hash, as (name, value)."""

    def shards(self, group: StoreIndex) -> list[RankPosition]:
        """
        Positions whose shards must all exist for a chunk to count as present.

        Args:
            group: Which one.

        Raises:
            IndexError: There is no such group.
        """

    def shard_of(self, group: StoreIndex, rank: RankPosition) -> RankPosition:
        """
        The position under which a rank stores and loads a group.

        Args:
            group: Which one.
            rank: The rank's own position.

        Returns:
            Its own, or the one that it shares with ranks of equal bytes.

        Raises:
            IndexError: There is no such group.
        """

    def stores(self, group: StoreIndex, rank: RankPosition, chunk: int) -> bool:
        """
        Whether this rank is the one of those with equal bytes that stores a chunk.

        Args:
            group: Which one.
            rank: The rank's own position.
            chunk: Number of the chunk.

        Returns:
            True for one of the ranks.

        Raises:
            IndexError: There is no such group.
        """

    def keys(self, group: StoreIndex, hashes: Any, shard: RankPosition = ...) -> list[str]:
        """
        Keys of one shard, one for each hash.

        Args:
            group: The group.
            hashes: A list of bytes, an array of shape (count, width), or flat bytes of 32 a hash.
            shard: A rank's position.

        Raises:
            ArgumentError: A hash is not 16 to 64 bytes wide, or no rank has the position.
        """

    def __repr__(self) -> str: ...

def rank_position(rank: int, projection: Projection) -> RankPosition:
    """
    The place of a rank: tensor ranks next to each other, then prefill context, then pipeline.

    Args:
        rank: Below tp x pp x pcp.
        projection: Of which the parallel sizes are taken.

    Returns:
        Its position; decode context ranks reuse the tensor ranks, or prefill context and tensor ranks.

    Raises:
        ArgumentError: There is no such rank.
    """

def pipeline_split_of(stages: Sequence[Projection]) -> str:
    """
    A ``pipeline_split`` for engines that know the layers of every stage.

    Equal texts mean the same layers of stored groups on each stage: names, order and specs, those of every member of
    a wrapper included.

    Args:
        stages: The projection of each stage, in the order of pipeline ranks.

    Returns:
        The text, alike on all ranks that give the same.

    Raises:
        ArgumentError: There are not as many as ``parallel.pp`` says.
    """

class CacheTensor:
    """
    One backing allocation, or a view of it that some layers use. Byte 0 of layer l, block b and head h is base + offset + l * layer_stride + b * block_stride + h * head_stride.
    """

    def __init__(self, memory: Any, *, layers: Sequence[str], block_stride: int, layer_stride: int = 0, offset: int = 0, bytes: int | None = None, device: int | None = None, head_stride: int = 0, kernel_block_size: int = 0) -> None:
        """
        Describes memory; nothing is read or written.

        Args:
            memory: The whole allocation as a contiguous writable array (NumPy, PyTorch, anything with a buffer, DLPack or
                ``__cuda_array_interface__``), which is kept alive and cannot be resized or closed meanwhile; or its address,
                which the caller keeps mapped.
            layers: Names, in the order of their places.
            block_stride: Bytes from one block to the next, at least a page.
            layer_stride: Bytes from one layer to the next.
            offset: Bytes from the start of the allocation to the first layer.
            bytes: Length of the allocation, only with an address.
            device: Ordinal of the accelerator, -1 for host memory; None takes the array's own, which arrays with nothing but
                ``__cuda_array_interface__`` do not tell.
            head_stride: Bytes from one head to the next; 0 takes what the layout and the other strides imply.
            kernel_block_size: Stored positions in a block of the attention kernel, when smaller than the block.

        Raises:
            ArgumentError: The memory is no such thing.
        """

    @property
    def address(self) -> int:
        """Address of the allocation."""

    @property
    def bytes(self) -> int:
        """Length of the allocation."""

    @property
    def device(self) -> int:
        """-1 for host memory."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""

    @property
    def block_stride(self) -> int:
        """In bytes."""

    @property
    def layer_stride(self) -> int:
        """In bytes."""

    @property
    def offset(self) -> int:
        """In bytes."""

    @property
    def head_stride(self) -> int:
        """In bytes; 0 where it is implied."""

    @property
    def kernel_block_size(self) -> int:
        """In stored positions; 0 for the block."""

class SegmentMap:
    """
    Where the bytes of a block lie, proven once: inside their allocations and disjoint. Keeps arrays alive that its tensors were made of.
    """

    def __init__(self, projection: Projection, tensors: Sequence[CacheTensor]) -> None:
        """
        Proves a geometry.

        Args:
            projection: The groups.
            tensors: Every allocation of the pool, or views of it.

        Raises:
            ConfigError: With every problem at once.
        """

    @property
    def projection(self) -> Projection:
        """The groups."""

    @overload
    def object_bytes(self, group: StoreIndex) -> int:
        """Bytes of one block of a group on this rank."""

    @overload
    def object_bytes(self, group: GroupId) -> int: ...

    def segments(self, group: GroupId, block: int) -> list[tuple[int, int]]:
        """
        Segments of one block in the order of the layout's name.

        Args:
            group: Any transferable group.
            block: Its id in the pool, not the null block.

        Returns:
            Pairs of address and bytes.

        Raises:
            ArgumentError: There is no such block.
        """

    @property
    def regions(self) -> list[tuple[int, int, int]]:
        """Each distinct allocation once, as (address, bytes, device)."""

    @property
    def layout_fingerprint(self) -> str:
        """32 hex digits over the geometry."""

def kernel_blocks(*, tokens_per_block: int, states_per_block: int, tokens_per_state: int, count: int) -> tuple[int, int]:
    """
    How many kernel blocks one block is, and how many blocks a pool of kernel blocks holds.

    Args:
        tokens_per_block: Tokens of one block of the scheduler.
        states_per_block: Stored positions of one kernel block.
        tokens_per_state: Tokens that one of them stands for.
        count: Kernel blocks in the pool.

    Raises:
        ConfigError: Either division leaves a rest.
    """

class MemoryPool:
    """Objects in this process's memory; outlives the stores that use it."""

    def __init__(self, *, capacity_bytes: int = 0, evict: bool = True, unfinished_for_seconds: float = 30.0) -> None:
        """
        Makes an empty pool.

        Args:
            capacity_bytes: Most bytes of all objects; 0 for no limit.
            evict: Make room by dropping the least recently used object; otherwise a full pool refuses.
            unfinished_for_seconds: An object whose writer died may be written again after this.

        Raises:
            ConfigError: A number is out of range.
        """

    def counters(self) -> dict[str, int]:
        """Counters by name."""

    def objects(self) -> list[tuple[str, int]]:
        """
        Every finished object.

        Returns:
            Pairs of key and bytes, sorted by key.
        """

    def read(self, key: str) -> bytes | None:
        """
        The content of one object, for tests.

        Args:
            key: Its name.

        Returns:
            Its bytes, or None.
        """

    def contains(self, key: str) -> bool:
        """
        Whether there is a finished object; does not count as a use.

        Args:
            key: Its name.

        Returns:
            True when there is.
        """

    def erase(self, key: str) -> bool:
        """
        Drops one object.

        Args:
            key: Its name.

        Returns:
            True when there was one.
        """

class ObjectStore:
    """
    A connection to a store, made by `memory_store`, `mooncake_store` or `inject_faults`.

    One worker may use it to move objects, and one scheduler to look them up.
    """

    @property
    def name(self) -> str:
        """What is behind it, with version and protocol."""

    def counters(self) -> dict[str, int]:
        """Counters by name; of the pool for a memory store."""

    def faults(self) -> dict[str, int]:
        """Faults raised so far by kind; empty unless made by `inject_faults`."""

    def release_hung(self) -> None:
        """Lets operations that an injected fault has hung run."""

    def close(self, timeout_seconds: float = 5.0) -> int:
        """
        Closes what no worker and no scheduler has taken; those close their own side.

        Args:
            timeout_seconds: Longest wait.

        Returns:
            Operations that did not end.

        Raises:
            ArgumentError: The timeout is below 0.
        """

def memory_store(pool: MemoryPool | None = None, *, latency_seconds: float = 0.0, max_segments_per_call: int = 0, max_bytes_per_call: int = 0) -> ObjectStore:
    """
    Connects to a pool in this process.

    Args:
        pool: Where the objects are; a new one by default.
        latency_seconds: Every operation takes this long.
        max_segments_per_call: Pieces of memory per call; 0 for no limit.
        max_bytes_per_call: Bytes per call; 0 for no limit.

    Returns:
        The store.

    Raises:
        ConfigError: A number is out of range.
    """

class MooncakeBuild:
    """A build of Mooncake whose binary interface is known."""

    @property
    def distribution(self) -> str:
        """Name of the package."""

    @property
    def version(self) -> str:
        """Version of the package."""

    @property
    def python_tag(self) -> str:
        """Such as cp311."""

    @property
    def library(self) -> str:
        """Path inside site-packages."""

    @property
    def build_id(self) -> str:
        """Build id of the library, in hex."""

    @property
    def exercised(self) -> bool:
        """True: it has moved bytes in our tests; False: only compared."""

    def __repr__(self) -> str: ...

def known_mooncake_builds() -> list[MooncakeBuild]:
    """Every build of Mooncake that is used without asking."""

def find_mooncake_library(library: str = '', site_packages: Sequence[str] | None = None) -> str:
    """
    Where Mooncake's store library is.

    Args:
        library: Its path, when it is known.
        site_packages: Folders to search; those of this interpreter by default.

    Returns:
        The path of the library.

    Raises:
        NotFoundError: There is none; says where it looked.
    """

def mooncake_store(*, master: str, local_hostname: str = '127.0.0.1', metadata_server: str = 'P2PHANDSHAKE', protocol: str = 'tcp', rdma_devices: Sequence[str] = [], global_segment_size: int = 0, local_buffer_size: int = 0, max_slices_per_call: int = 8192, max_bytes_per_call: int = 268435456, connect_timeout_seconds: float = 2.0, library: str = '', site_packages: Sequence[str] | None = None, python_library: str = '', unknown_build: str = 'refuse', environment: Mapping[str, str] = {}, rdma_device_folder: str | None = None, setup_timeout_seconds: float = 15.0, max_region_bytes: int = 0) -> ObjectStore:
    """
    Connects to a Mooncake store.

    Args:
        master: Address of mooncake_master, as host:port.
        local_hostname: Under which other clients reach this one.
        metadata_server: P2PHANDSHAKE, or a URL with a scheme.
        protocol: tcp or rdma.
        rdma_devices: For rdma only; Mooncake chooses when empty.
        global_segment_size: Bytes that this process gives to the pool; 0, or at least 16 MiB. They go with the client, also
            when it is replaced: lend with a store that nothing else uses.
        local_buffer_size: Bytes of Mooncake's staging buffer; 0, or at least 16 MiB.
        max_slices_per_call: Pieces of memory per native call, 1 to 8192; at most half of Mooncake's TCP queue to a peer.
        max_bytes_per_call: Bytes per call that a worker makes; 0 for no limit.
        connect_timeout_seconds: Bound for reaching the master's port.
        library: Path of Mooncake's store library; found by itself when empty.
        site_packages: Folders to search for it; those of this interpreter by default.
        python_library: Not needed inside Python.
        unknown_build: "refuse", or "probe" to try a build that is not known in a process of its own first.
        environment: Variables that Mooncake reads, set before its library is opened for the first time.
        rdma_device_folder: Where RDMA devices are listed.
        setup_timeout_seconds: Bound of the whole set-up.
        max_region_bytes: Memory is registered in pieces of at most so many bytes; 0 for 2 GiB with rdma and whole regions with tcp, else at least 1 MiB.

    Returns:
        The store, connected.

    Raises:
        ConfigError: Options are malformed; all problems at once.
        NotFoundError: The library, a symbol of it or an RDMA device is missing.
        UnsupportedError: The build is not known.
        UnavailableError: The master does not answer.
        TimedOutError: Set-up took longer than its bound.
    """

class RdmaFacts:
    """
    What there is for RDMA on a machine, and what of it Mooncake cannot use.
    """

    def __init__(self, *, devices: Sequence[str] = [], ports: Sequence[tuple[str, str, str, bool]] = [], memory_lock_bytes: int | None = None, may_lock_memory: bool = False, forced_tcp: str | None = None) -> None:
        """
        Facts that are known.

        Args:
            devices: Names of the devices.
            ports: Of each port the device, its number, its state ("ACTIVE", "DOWN") and whether it has a GID.
            memory_lock_bytes: How much a process may lock; None for no limit.
            may_lock_memory: The process may lock more than that.
            forced_tcp: What the environment has for MC_FORCE_TCP.
        """

    @staticmethod
    def read(folder: str = '/sys/class/infiniband') -> RdmaFacts:
        """
        Looks at this machine.

        Args:
            folder: Where devices are listed.

        Returns:
            What was found.
        """

    @property
    def folder(self) -> str:
        """Where devices are listed."""

    @property
    def devices(self) -> list[str]:
        """Names of the devices."""

    @property
    def ports(self) -> list[tuple[str, str, str, bool]]:
        """
        Of each port the device, its number, its state and whether it has a GID.
        """

    @property
    def memory_lock_bytes(self) -> int | None:
        """How much this process may lock; None for no limit."""

    @property
    def may_lock_memory(self) -> bool:
        """It may lock more than that."""

    @property
    def forced_tcp(self) -> str | None:
        """MC_FORCE_TCP in the environment."""

    def problems(self, *, rdma_devices: Sequence[str] = [], locked_bytes: int = 0) -> list[Problem]:
        """
        What would end the set-up of a store with protocol rdma.

        Args:
            rdma_devices: Devices to be used; all when empty.
            locked_bytes: Bytes of cache, segment and buffer that each device must lock; 0 when not known.

        Returns:
            Every problem.
        """

def inject_faults(store: ObjectStore, *, seed: int = 1, delay_seconds: float = 0.02, late_seconds: float = 0.1, lookup_late_seconds: float = 1.0, region_delay_seconds: float = 0.0, **chances: float) -> ObjectStore:
    """
    Wraps a store so that it misbehaves, for tests.

    Args:
        store: A store that nobody uses yet; the wrapper takes it over.
        seed: Equal seeds and operations give equal faults.
        delay_seconds: Longest delay of `delay`.
        late_seconds: Longest time between outcome and the late end of `land_late` and `late_quiet`.
        lookup_late_seconds: Longest delay of `lookup_late`.
        region_delay_seconds: How much longer it takes to register memory.
        chances: Chance of each kind of fault per operation, from 0 to 1, such as fail_call=0.01.

    Returns:
        The wrapper.

    Raises:
        ArgumentError: An unknown kind of fault, or a chance outside 0 to 1.
    """

def replay_run(recording: bytes | bytearray | memoryview, registry: SpecRegistry | None = None) -> dict[str, int | bool | str]:
    """
    Repeats what a StoreScheduler did, from the file that its `record_to` named.

    Args:
        recording: The content of the file.
        registry: Knows the kinds of cache that the scheduler's engine has; None for the built-in ones.

    Returns:
        "calls", "steps" and "plans" that were repeated; "same", whether every call did and returned what it had; the first
        "difference" otherwise; "ignored_bytes" of a last call that was cut off; "ended", whether the file says that nothing
        follows; "recorded_by" and "repeated_by", versions and compilers.

    Raises:
        Error: The bytes are no recording of this version, go on behind its end, or name a kind that `registry` lacks.
    """

class StepPlan:
    """
    The jobs of one engine step, from the scheduler to the workers.

    In one process the object itself is submitted. It pickles as its encoded bytes.
    """

    def __len__(self) -> int:
        """Number of jobs."""

    def __bool__(self) -> bool:
        """
        True when there is something to tell a worker: a job, or a question about an earlier one.
        """

    @property
    def step(self) -> int:
        """Number of the engine step, from 1."""

    @property
    def epoch(self) -> int:
        """The scheduler's random number."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the jobs move."""

    def blocks(self, job: int) -> list[int]:
        """
        Where one job reads or writes.

        Args:
            job: Its number.

        Returns:
            Block ids in the order of the plan; none when the plan has no such job.
        """

    def encode(self) -> bytes:
        """
        The plan as bytes, for a worker in another process.

        Returns:
            Little-endian bytes whose size follows the blocks moved, not the length of any request.
        """

    @staticmethod
    def decode(data: object) -> StepPlan:
        """
        Reads what `encode` has written.

        Args:
            data: Bytes or a contiguous buffer.

        Returns:
            The plan.

        Raises:
            Error: The bytes are no plan of this version, or an index in them lies outside it.
        """

    def __getstate__(self) -> bytes:
        """The encoded plan."""

    def __setstate__(self, state: bytes) -> None:
        """Takes over an encoded plan."""

class ReadyToken:
    """
    Proof that the bytes of a step's saves are in memory.

    Without it a save could read a block that the accelerator has not written yet.
    """

    @staticmethod
    def host() -> ReadyToken:
        """
        The caller has synchronised: the bytes are there now.

        Returns:
            A token that is ready.
        """

    @staticmethod
    def failed() -> ReadyToken:
        """
        The bytes were not written, e.g. because the step has failed.

        Returns:
            A token with which a plan's jobs end as failed, without a call.
        """

    @staticmethod
    def device_event(event: int, query: int, not_ready: int, destroy: int = 0, bind: int = 0, device: int = 0) -> ReadyToken:
        """
        A device event that was recorded after the writes.

        Args:
            event: Handle of the event, as an integer.
            query: Address of a C function `int query(void *event)` that answers 0 when the event has happened,
                such as cudaEventQuery. It is called from a thread of the worker, without the GIL.
            not_ready: What `query` answers before, such as 600 (cudaErrorNotReady); anything else is an error.
            destroy: Address of `void destroy(void *event)`; 0 when the caller keeps the event alive.
            bind: Address of `int bind(int device)`, such as cudaSetDevice: called before `query` and `destroy`,
                because the worker's thread is on no device of its own; answers 0. 0 where nothing is needed.
            device: What `bind` is given.

        Returns:
            A token that becomes ready with the event.

        Raises:
            Error: `query` is 0.
        """

class FailedBlock:
    """A block that a load should have filled and did not."""

    @property
    def group(self) -> GroupId:
        """Index of the group in the configuration."""

    @property
    def chunk(self) -> int:
        """Position of the block in the request's table."""

    @property
    def block(self) -> int:
        """Id of the block."""

class LoadEnd:
    """
    The end of one load; exactly one for each job that `allocated` returned.
    """

    @property
    def request(self) -> int:
        """The request it was for."""

    @property
    def job(self) -> int:
        """The job that `allocated` returned."""

    @property
    def valid_tokens(self) -> int:
        """Length of the usable prefix, local tokens included."""

    @property
    def complete(self) -> bool:
        """Everything that was promised has arrived."""

    @property
    def blocks_quiet(self) -> bool:
        """False: the blocks are in quarantine, the request needs others."""

    @property
    def failed(self) -> list[FailedBlock]:
        """Blocks that do not hold what they should."""

class StoreChange:
    """A chunk that every rank has stored, or one that is no longer there."""

    @property
    def stored(self) -> bool:
        """False: it is gone."""

    @property
    def request(self) -> int:
        """The request that stored or missed it."""

    @property
    def group(self) -> GroupId:
        """Index of the group in the configuration."""

    @property
    def chunk(self) -> int:
        """Position of its block in the request's table."""

    @property
    def tokens(self) -> int:
        """Length of the prefix that ends with it."""

    @property
    def hash(self) -> bytes:
        """Hash of that prefix."""

    @property
    def parent(self) -> bytes:
        """
        Hash of the prefix shorter by a chunk, or by a hash unit where `tokens` ends inside a chunk; empty when there is none.
        """

class SubmitResult:
    """Whether a worker took a plan; true in a condition when it did."""

    def __bool__(self) -> bool:
        """Same as `accepted`."""

    @property
    def accepted(self) -> bool:
        """
        False: the plan's jobs are reported as failed and quiet, unless `repeated`.
        """

    @property
    def refusal(self) -> str:
        """Why not, with both values; empty when accepted."""

    @property
    def repeated(self) -> bool:
        """
        Not accepted, and jobs of the plan were taken before: they may be running, and tell their ends themselves.
        """

class StoreScheduler:
    """
    The engine's scheduler side of the store.

    It decides what is looked up, loaded and saved, and holds references on the blocks that jobs use. No call blocks; every
    call is harmless for unknown requests and may be repeated. One call at a time, from any thread: a second one raises
    ArgumentError. A checked scheduler raises ArgumentError for calls out of order; a refused call does nothing.

    Block tables are given as `rows`, one row for each group of the configuration: lists, integer arrays, or bytes that hold
    native 32-bit integers. `hashes` are the engine's block hashes: a list of bytes, an array of shape (count, width), or
    flat bytes. Both are copied before the call returns.
    """

    def __init__(self, schema: KeySchema, store: ObjectStore, *, epoch: int | None = None, loads: bool = True, saves: bool = True, lookup_timeout_seconds: float = 0.5, lookup_fresh_for_seconds: float = 5.0, load_timeout_seconds: float = 20.0, save_timeout_seconds: float = 60.0, quarantine_after_seconds: float = 120.0, detach_quarantined_loads: bool = False, backoff_after: int = 3, backoff_seconds: float = 5.0, saved_fresh_for_seconds: float = 60.0, avoid_failed_for_seconds: float = 5.0, purge_settle_seconds: float = 12.0, healthy_after_seconds: float = 5.0, max_held_percent: int = 100, flight_record_path: str = '', record_to: str | None = None, hash_width: int = 32, tell_changes: bool = False, checked: bool = False) -> None:
        """
        Takes the index side of `store`.

        Args:
            schema: Names the objects.
            store: Where objects are looked up; no other scheduler may use it.
            epoch: Travels in every plan and report; random by default.
            loads: Look up and load.
            saves: Save.
            lookup_timeout_seconds: A later answer is a miss.
            lookup_fresh_for_seconds: An unused answer is asked again after this.
            load_timeout_seconds: Bound of a load's outcome.
            save_timeout_seconds: Bound of a save's outcome.
            quarantine_after_seconds: Blocks that are still in use this long after the outcome go to quarantine.
            detach_quarantined_loads: End such loads; the engine must then give the request other blocks.
            backoff_after: Consecutive saves that the store refused (full, away or late) before saving pauses.
            backoff_seconds: Length of that pause.
            saved_fresh_for_seconds: What was saved is not saved again for this long.
            avoid_failed_for_seconds: A chunk whose load failed counts as absent for this long.
            purge_settle_seconds: The last pass of a purge begins this long after the store was last used; above the store's lease.
            healthy_after_seconds: A reason for being degraded is told for this long at least.
            max_held_percent: Nothing is saved while jobs hold more of the pool's blocks; 100 for no bound.
            flight_record_path: File that gets the flight record at its end at a quarantine, a silent rank or a mismatch; "" for the log.
            record_to: New file that gets everything which decides, in the step itself; `kvprism replay-run` repeats it. It holds hashes, no tokens.
            hash_width: Bytes of a hash in flat bytes; other forms tell it themselves.
            tell_changes: Keep for `take_changes` what comes and goes.
            checked: Raise ArgumentError for calls out of order, which are otherwise counted and ignored; for an engine's first
                weeks.

        Raises:
            Error: The configuration cannot be used with a store, or an option is out of range; all problems at once.
        """

    @property
    def epoch(self) -> int:
        """Travels in every plan and report."""

    def set_mode(self, mode: str) -> None:
        """
        What the store is used for from now on; jobs in flight go on to their end.

        Args:
            mode: "read_write", "read_only", "write_only" or "off", within what `loads` and `saves` allow.

        Raises:
            ArgumentError: No such mode.
            ClosedError: After `close`, or in a forked child.
        """

    @property
    def mode(self) -> str:
        """The mode in force."""

    def purge(self) -> None:
        """
        Removes every object whose key begins as this scheduler's keys do, and no other.

        From now on nothing is looked up, loaded or saved until it is done, which the following steps see to: first jobs in
        flight end, on every rank. A load that is overtaken fails as a whole. What requests of now have computed is not saved
        any more. Objects that another engine reads or looks up meanwhile stay: purge on all engines of the namespace.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def purge_status(self) -> dict[str, str | int]:
        """
        How far the last purge is.

        Returns:
            "state": "none", "draining" (jobs in flight end), "removing", "waiting" (for leases, or for a store that does not
            answer) or "done"; "removed" objects; "passes" over the store.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def restrict(self, request: int, *, load: bool = True, save: bool = True) -> None:
        """
        Keeps one request out of the store, until `finished` ends it. Call it before its first lookup.

        Args:
            request: The request; begun by this call if it is unknown.
            load: Whether it may load.
            save: Whether it may be saved.

        Raises:
            ArgumentError: A number does not fit.
            ClosedError: After `close`, or in a forked child.
        """

    def lookup(self, request: int, prompt_tokens: int, hashes: object, local_tokens: int = 0) -> int | None:
        """
        How many tokens the store offers beyond the engine's own.

        Args:
            request: Chosen by the engine, unique among live requests.
            prompt_tokens: Length of the prompt.
            hashes: All hashes of the prompt; those known from an earlier call are not read again.
            local_tokens: The engine's own hit, a multiple of the scheduler block size; others get 0.

        Returns:
            The number of tokens, 0 for none, or None: ask again in the next step.

        Raises:
            ArgumentError: A number does not fit, or the hashes are none of the forms or not of 16 to 64 bytes; of a checked
                scheduler also a hit off the grid, hashes that do not continue the known ones, or a request that waits for a load.
            ClosedError: After `close`, or in a forked child.
        """

    def allocated(self, request: int, external_tokens: int, rows: object) -> int | None:
        """
        The engine has blocks for the request and will wait for the load.

        Args:
            request: The request.
            external_tokens: What `lookup` offered, or 0 when the engine does not want it.
            rows: Block tables, a row for each group.

        Returns:
            The load's job, whose end `take_load_ends` tells, or None: nothing is loaded.

        Raises:
            ArgumentError: A number does not fit, or a row holds no block ids; of a checked scheduler also an unknown request,
                other tokens than those offered, or tables that do not cover them.
            ClosedError: After `close`, or in a forked child.
        """

    def prompt(self, request: int, prompt_tokens: int) -> None:
        """
        Tells how long the prompt is, for requests that are not looked up.

        Where hits may end inside a block, the end of a prompt is saved as well.

        Args:
            request: The request.
            prompt_tokens: Tokens of its prompt.

        Raises:
            ArgumentError: A number does not fit.
            ClosedError: After `close`, or in a forked child.
        """

    def advanced(self, request: int, accepted_tokens: int, hashes: object = None, first_hash: int = 0) -> None:
        """
        Tells how many tokens of the request are computed and final after this step.

        Args:
            request: The request.
            accepted_tokens: May shrink, when draft tokens are rejected.
            hashes: Hashes of the request; those known already are skipped.
            first_hash: Index of the first of them; at most `known_hashes`.

        Raises:
            ArgumentError: A number does not fit, or the hashes are none of the forms or not of 16 to 64 bytes; of a checked
                scheduler also hashes that do not continue the known ones, an open offer, or a request that waits for a load.
            ClosedError: After `close`, or in a forked child.
        """

    def known_hashes(self, request: int) -> int:
        """
        How many hashes of the request the scheduler has.

        Args:
            request: The request.

        Returns:
            Their number; 0 for unknown requests.

        Raises:
            ArgumentError: A number does not fit.
            ClosedError: After `close`, or in a forked child.
        """

    def wants_save(self, request: int) -> tuple[int, int] | None:
        """
        What is ready to be saved and not yet planned.

        Args:
            request: The request.

        Returns:
            First and end token of the range, or None.

        Raises:
            ArgumentError: A number does not fit; of a checked scheduler also an unknown request.
            ClosedError: After `close`, or in a forked child.
        """

    def saves_paused(self) -> bool:
        """
        Whether `wants_save` says no to every request now: by mode, purge, back-off or max_held_percent.

        Returns:
            True while nothing is saved; afterwards `wants_save` is worth asking again.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def save(self, request: int, range: tuple[int, int], rows: object) -> None:
        """
        Plans a save from the engine's present block tables.

        Args:
            request: The request.
            range: What `wants_save` returned, or a shorter range from the same token.
            rows: Block tables of this step, a row for each group; null blocks are never read.

        Raises:
            ArgumentError: A number does not fit, or a row holds no block ids; of a checked scheduler also an unknown request, a
                range that `wants_save` did not return, or tables that do not cover it.
            ClosedError: After `close`, or in a forked child.
        """

    def boundary(self, request: int, group: GroupId, block: int, tokens: int) -> None:
        """
        Offers the state that ends a prefix, for groups that hand off states.

        Args:
            request: The request.
            group: The group.
            block: Block that holds the state.
            tokens: Length of the prefix, a multiple of the group's tokens per block.

        Raises:
            ArgumentError: A number does not fit; of a checked scheduler also an unknown request, the null block, a group that
                hands nothing off, or tokens off the grid.
            IndexError: The configuration has no such group.
            ClosedError: After `close`, or in a forked child.
        """

    def preempted(self, request: int) -> None:
        """
        The request has lost its blocks and will start again.

        Args:
            request: The request.

        Raises:
            ArgumentError: A number does not fit; of a checked scheduler also an unknown request, or acquired blocks not taken.
            ClosedError: After `close`, or in a forked child.
        """

    def finished(self, request: int, aborted: bool = False) -> None:
        """
        The request is over; jobs in flight keep their blocks.

        Args:
            request: The request.
            aborted: It was ended from outside.

        Raises:
            ArgumentError: A number does not fit; of a checked scheduler also an unknown request, or acquired blocks not taken.
            ClosedError: After `close`, or in a forked child.
        """

    def end_step(self) -> StepPlan:
        """
        Sends the step's lookups as one call and hands over the step's jobs.

        Returns:
            The plan, for every worker; often empty.

        Raises:
            ArgumentError: Of a checked scheduler: acquired blocks, released blocks or load ends have not been taken.
            ClosedError: After `close`, or in a forked child.
        """

    def report(self, data: bytes | bytearray | memoryview) -> bool:
        """
        Takes in reports of workers.

        Args:
            data: One or several reports, one behind the other.

        Returns:
            False when some of it could not be taken, and was counted as `reports_malformed` or `reports_foreign`.

        Raises:
            ArgumentError: `data` is no contiguous bytes.
            MismatchError: Of a checked scheduler, instead of False; the rest has been taken.
            ClosedError: After `close`, or in a forked child.
        """

    def rank_gone(self, rank: int) -> None:
        """
        Says that a worker's process has ended, and its memory with it, so that no block waits for it.

        Of all jobs planned so far the rank counts as failed and quiet. Never for a process that may live: its calls would go on
        in blocks that are somebody else's. A worker that takes its place must get no plan of before.

        Args:
            rank: Its number.

        Raises:
            ArgumentError: A number does not fit; of a checked scheduler also a rank that the configuration does not have.
            ClosedError: After `close`, or in a forked child.
        """

    def take_load_ends(self) -> list[LoadEnd]:
        """
        Loads that have ended since the last call.

        Returns:
            A list; each load appears once.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def take_changes(self) -> list[StoreChange]:
        """
        What every rank has stored, and what a load no longer found or found damaged, or a lookup no longer found, since the last call.

        Returns:
            A list, in order; empty unless `tell_changes` was set.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def saving_requests(self) -> set[int]:
        """
        Requests of which a save is in flight: changes may still name these and no other one that has finished.

        Returns:
            Their numbers.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def take_acquired(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Blocks that need one more reference, to be added before any block is freed.

        Returns:
            Block ids, in order; an id may appear more than once.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def take_released(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Blocks that need one reference less.

        Returns:
            Block ids, in order; an id may appear more than once.

        Raises:
            ArgumentError: Of a checked scheduler: acquired blocks have not been taken.
            ClosedError: After `close`, or in a forked child.
        """

    def has_pending_work(self) -> bool:
        """
        True while the engine must keep stepping: a job is not quiet, or something waits to be taken.
        """

    def tracked(self) -> int:
        """
        Requests, jobs and lookups that are remembered; 0 at the end of a clean run.
        """

    def health(self) -> str:
        """
        How the store is doing, as of the last step. Each change is one log line.

        Returns:
            "healthy", "off", or "degraded: " and the reasons.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def flight_record(self, most: int = 4096) -> str:
        """
        The last events: seconds before the last one, what happened, and three numbers.

        Args:
            most: At most so many events.

        Returns:
            A line for each, oldest first.

        Raises:
            ArgumentError: A number does not fit.
            ClosedError: After `close`, or in a forked child.
        """

    def counters(self) -> dict[str, int | dict[str, int]]:
        """
        Counters by name; those of the jobs under 'ledger', count and sum of durations by name.
        """

    def durations(self) -> dict[str, dict[str, int]]:
        """
        Histograms of durations.

        Returns:
            By name of the duration: "count", "sum_us", and how many took at most so many microseconds and more than the bound
            before it, "up_to_us_" and the bound.

        Raises:
            ClosedError: After `close`, or in a forked child.
        """

    def close(self, timeout_seconds: float = 5.0) -> int:
        """
        Ends lookups; every later call but this one raises ClosedError.

        Args:
            timeout_seconds: Longest wait for lookups in flight.

        Returns:
            Lookups that did not end.

        Raises:
            ArgumentError: The timeout is below 0, or another call runs.
        """

class StoreWorker:
    """
    One rank's side of the store: carries plans out and reports.

    A thread of its own moves the jobs along from the first `submit` on. Calls may come from any thread, and those that wait
    or copy run without the GIL.
    """

    def __init__(self, schema: KeySchema, segment_map: SegmentMap, store: ObjectStore, *, rank: int = 0, max_segments_per_call: int = 512, max_bytes_per_call: int = 67108864, max_gets_in_flight: int = 4, max_puts_in_flight: int = 2, max_queued_jobs: int = 65536, max_bytes_in_flight: int = 1073741824, only: bool = False) -> None:
        """
        Takes the store side of `store` and registers the memory of `segment_map` with it.

        Args:
            schema: Names the objects; of the same configuration as the scheduler's.
            segment_map: Where the blocks lie. Its memory must stay mapped until `close` has returned 0.
            store: Where objects are put and got; no other worker may use it.
            rank: Number of this worker, from 0: its place among tp x pp x pcp.
            max_segments_per_call: Pieces of memory per call to the store.
            max_bytes_per_call: Bytes per call to the store.
            max_gets_in_flight: Calls at a time.
            max_puts_in_flight: Calls at a time.
            max_queued_jobs: Jobs submitted and not yet seen by the thread.
            max_bytes_in_flight: Bytes of calls that are not quiet beyond which saves wait, and loads do not; 0 for no limit.
            only: No worker of this process has had jobs of this scheduler before: what the scheduler asks about and this one does
                not know is over. Otherwise that holds of jobs from its first plan on.

        Raises:
            Error: An option is out of range, the configurations differ, or the memory cannot be registered.
        """

    @overload
    def submit(self, plan: StepPlan, ready: ReadyToken) -> SubmitResult:
        """
        Takes a plan that was made in this process.

        Args:
            plan: Of the scheduler's `end_step`; copied.
            ready: Says when the bytes that the plan saves are in memory.

        Returns:
            Whether the plan was accepted. The jobs of a refused one are reported as failed, unless it was taken before.

        Raises:
            ArgumentError: A simulated engine has taken the worker over.
            ClosedError: After `close`, or in a forked child.
        """

    @overload
    def submit(self, plan: bytes | bytearray | memoryview, ready: ReadyToken) -> SubmitResult:
        """
        Takes an encoded plan, as bytes or a buffer.

        Raises:
            ArgumentError: `plan` is no contiguous bytes, or a simulated engine has taken the worker over.
            ClosedError: After `close`, or in a forked child.
        """

    def poll(self) -> bytes | None:
        """
        What has happened since the last call.

        Returns:
            A report for the scheduler, or None.
        """

    def wait(self, timeout_seconds: float) -> bytes | None:
        """
        Waits, without the GIL, for something to happen.

        Args:
            timeout_seconds: Longest wait.

        Returns:
            A report for the scheduler, or None when nothing has happened.

        Raises:
            ArgumentError: The timeout is below 0, or a simulated engine has taken the worker over.
            ClosedError: After `close`, or in a forked child.
        """

    def counters(self) -> dict[str, int]:
        """Counters by name."""

    def group_counters(self) -> list[dict[str, int | dict[str, int]]]:
        """
        What this rank has moved of each group's blocks, in the order of the configuration's groups.
        """

    def close(self, timeout_seconds: float = 5.0) -> int:
        """
        Starts nothing new, cancels what has not started, and waits for the rest.

        A last report can be polled afterwards; other calls raise ClosedError.

        Args:
            timeout_seconds: Longest wait.

        Returns:
            Calls that may still touch the memory, which must then stay mapped: a kept reference to the segment map sees to it.
            A later call tells how many are left.

        Raises:
            ArgumentError: The timeout is below 0, or a simulated engine has taken the worker over.
        """

class RankLoadEnd:
    """The end of one load on one rank: its blocks are quiet there."""

    @property
    def job(self) -> int:
        """The job of the plan."""

    @property
    def request(self) -> int:
        """The request it was for."""

    @property
    def complete(self) -> bool:
        """Everything of this rank has arrived."""

    @property
    def failed_blocks(self) -> list[int]:
        """Ids of blocks that do not hold what they should."""

class RankLoads:
    """
    What the loads of one rank have come to.

    For engines that hear of loads from their workers: the ends are made of the rank's own reports, without a way through
    the scheduler's process. One call at a time.
    """

    def __init__(self) -> None:
        """Knows of no loads yet."""

    def expect(self, plan: bytes | bytearray | memoryview) -> None:
        """
        Takes in the loads of a plan, once the worker has taken it and before its next poll.

        Args:
            plan: An encoded plan.

        Raises:
            Error: The bytes are no plan of this version.
        """

    def take(self, reports: bytes | bytearray | memoryview) -> list[RankLoadEnd]:
        """
        Reads what `StoreWorker.poll` gave.

        Args:
            reports: One or several reports, one behind the other.

        Returns:
            The loads that are over; each appears once.

        Raises:
            Error: The bytes are no report of this version.
        """

    def abandon(self, job: int) -> list[RankLoadEnd]:
        """
        Ends a load before it is quiet, with every block failed.

        Args:
            job: Of a load in quarantine, whose blocks the scheduler keeps.

        Returns:
            Its end, or an empty list when the load is not known.
        """

    def __len__(self) -> int:
        """Loads in flight."""

class SimMemory:
    """
    The memory of a simulated rank, with guard bytes around every block and layer.
    """

    def __init__(self, projection: Projection, *, guard_bytes: int = 64, shadow: bool = False) -> None:
        """
        Allocates and poisons it.

        Args:
            projection: Tells the groups and the number of blocks.
            guard_bytes: Between blocks, between layers and around it; a multiple of 8.
            shadow: Keep a second copy of what it should hold, for `Engine.check`.
        """

    @property
    def size_bytes(self) -> int:
        """Bytes, guards included."""

    def segment_map(self) -> SegmentMap:
        """
        Where the blocks lie, for a worker.

        Returns:
            A map that keeps this memory alive.
        """

    def array(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        All of it, for tests that look or write where they should not.

        Returns:
            A writable view that keeps this memory alive.
        """

    def page(self, group: GroupId, layer: int, block: int) -> bytes:
        """
        A copy of one layer's page.

        Args:
            group: The group whose page it is.
            layer: Position of the layer in the group.
            block: Id of the block.

        Returns:
            Its bytes.
        """

class SimFinishedRequest:
    """A request that has left the engine."""

    @property
    def id(self) -> int:
        """As submitted."""

    @property
    def aborted(self) -> bool:
        """Ended from outside."""

    @property
    def rejected(self) -> bool:
        """It can never fit."""

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""

    @property
    def local_hit_tokens(self) -> int:
        """From the engine's own cache, at its first start."""

    @property
    def external_hit_tokens(self) -> int:
        """From the store, at its first start."""

    @property
    def preemptions(self) -> int:
        """How often it lost its blocks."""

    @property
    def output(self) -> list[int]:
        """Generated tokens, a function of the prompt."""

class SimEngine:
    """
    A simulated serving engine with a hybrid cache, in real time.

    It makes the calls of a real engine in their order. What it computes is a function of the tokens, so it knows what every
    loaded byte must be and compares all of them. One call at a time; calls that run it release the GIL.
    """

    def __init__(self, scheduler: StoreScheduler, worker: StoreWorker, memory: SimMemory, *, local_cache: bool = True, token_budget: int = 2048, max_running: int = 8, max_model_tokens: int = 1048576) -> None:
        """
        Takes over scheduler and worker.

        Args:
            scheduler: Of one rank; used by the engine alone from now on.
            worker: Not used before; the engine submits, pumps and closes.
            memory: The memory behind the worker's segment map.
            local_cache: Keep a prefix cache of its own.
            token_budget: Tokens computed in a step.
            max_running: Requests computed in a step.
            max_model_tokens: Longest prompt with its output.

        Raises:
            Error: The worker is in use, or the memory is not its own.
        """

    def submit(self, request: int, prompt: object, max_new_tokens: int = 1) -> None:
        """
        Adds a request.

        Args:
            request: An id that no live request has.
            prompt: Token ids: a list, an integer array, or bytes that hold native 32-bit integers.
            max_new_tokens: Tokens to generate, at least 1.
        """

    def abort(self, request: int) -> None:
        """
        Ends a request; harmless for unknown ones.

        Args:
            request: Its id.
        """

    def step(self) -> bool:
        """
        Computes one step and moves loads and saves along.

        Returns:
            False when there was nothing to do but wait for the store.
        """

    def run_until_idle(self, timeout_seconds: float) -> bool:
        """
        Steps until no request and no job is left.

        Args:
            timeout_seconds: Longest time.

        Returns:
            True when idle, False when the time is over.
        """

    def idle(self) -> bool:
        """True when no request and no job is left."""

    def unfinished(self) -> int:
        """Requests that have not left."""

    def take_finished(self) -> list[SimFinishedRequest]:
        """
        Requests that have left since the last call.

        Returns:
            A list in the order of their leaving.
        """

    def stats(self) -> dict[str, Any]:
        """
        What has happened so far.

        Returns:
            Counters by name; 'groups' has a row for each group, 'loads' and 'saves' tell bytes and the seconds they took.
        """

    def verify_all(self) -> tuple[int, int]:
        """
        Compares everything the engine believes computed with what it must be.

        Returns:
            Bytes compared, and bytes that differ.
        """

    def check(self) -> str:
        """
        The first broken invariant, or an empty string. Needs a memory with a shadow.
        """

    def describe(self) -> str:
        """Requests, blocks and jobs in one line."""

    def close(self, timeout_seconds: float = 5.0) -> int:
        """
        Closes worker and scheduler; other calls raise ClosedError afterwards.

        Args:
            timeout_seconds: Longest wait for calls to the store.

        Returns:
            Calls that may still touch the memory.
        """

class SimRingDetector:
    """
    Recognises bytes of scratch rings wherever they are.

    Made from tokens alone: it knows nothing of keys, hashes, blocks or objects. One call at a
    time: a second thread gets an ArgumentError.
    """

    def __init__(self, projection: Projection) -> None:
        """
        Knows no tokens yet.

        Args:
            projection: Tells which groups are rings.
        """

    def add(self, tokens: object) -> None:
        """
        Learns what rings hold while these tokens are computed.

        Args:
            tokens: A prompt with its output.
        """

    @property
    def patterns(self) -> int:
        """Beginnings of ring positions that are known."""

    def count(self, data: object) -> int:
        """
        Looks for ring bytes.

        Args:
            data: Bytes or a contiguous buffer, as read from a store.

        Returns:
            How many aligned words begin a position of a ring.
        """
