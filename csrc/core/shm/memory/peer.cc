#include "core/shm/memory/peer.h"

#include <cstring>
#include <string>
#include <utility>

namespace dscomm {
Peer::Peer(const PeerAddress& address, Mapping mapping, UniqueFd pidfd, PoolView pool)
    : address_(address),
      mapping_(std::move(mapping)),
      pidfd_(std::move(pidfd)),
      data_(mapping_.data()),
      bytes_(mapping_.size()),
      pool_mapping_(std::move(pool.mapping)),
      pool_data_(pool_mapping_.data()),
      pool_bytes_(pool_mapping_.size()),
      pool_missing_(pool.missing) {}

Peer::Peer(const PeerAddress& address, std::shared_ptr<Arena> arena,
           std::shared_ptr<TensorPool> pool)
    : address_(address),
      arena_(std::move(arena)),
      data_(arena_->data()),
      bytes_(arena_->size()),
      pool_(std::move(pool)),
      pool_data_(pool_ == nullptr ? nullptr : pool_->data()),
      pool_bytes_(pool_ == nullptr ? 0 : pool_->size()) {}

std::string PeerAddress::host_name() const { return {host, strnlen(host, sizeof host)}; }

std::string PeerAddress::describe() const {
  return "pid " + std::to_string(pid) + " on host " + host_name();
}

}  // namespace dscomm
