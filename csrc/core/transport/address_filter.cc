#include "core/transport/address_filter.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>

#include "core/transport/networks.h"

namespace dscomm {
namespace {

constexpr uint32_t kKeep = ~0u, kDrop = 0;
// The most trailing bits in which the addresses of a block may differ.
constexpr int kMostWidened = 16;

using Words = std::vector<uint32_t>;  // an address, the most significant word first

std::optional<Words> words_of(const std::string& address, int family) {
  const std::optional<SocketAddress> name = socket_address(address, 0);
  if (!name || name->storage.ss_family != family) return {};
  Words words(family == AF_INET ? 1 : 4);
  const void* bytes =
      family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(name->get())->sin_addr)
          : &reinterpret_cast<const sockaddr_in6*>(name->get())->sin6_addr;
  std::memcpy(words.data(), bytes, words.size() * sizeof(uint32_t));
  for (uint32_t& word : words) word = ntohl(word);
  return words;
}

// Makes the BPF code of a binary search in a sorted list of addresses, word by word.
class SearchProgram {
 public:
  // `first`: the source address's offset in IP's header. `last_mask`: for that address's last word.
  SearchProgram(size_t first, uint32_t last_mask) : first_(first), last_mask_(last_mask) {}

  // Adds the search from word `word` on; the words before are the same in all `addresses`.
  void find(std::span<const Words> addresses, size_t word) {
    const auto place = static_cast<uint32_t>(SKF_NET_OFF) +
                       static_cast<uint32_t>(first_ + word * sizeof(uint32_t));
    code_.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, place));
    if (is_last(addresses, word) && last_mask_ != ~0u)
      code_.push_back(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, last_mask_));
    compare(addresses, word);
  }

  std::vector<sock_filter> take() { return std::move(code_); }

 private:
  static bool is_last(std::span<const Words> addresses, size_t word) {
    return word + 1 == addresses.front().size();
  }

  // Adds the comparison of this word, for which find() has added the load.
  void compare(std::span<const Words> addresses, size_t word) {
    if (addresses.front()[word] == addresses.back()[word]) {
      code_.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, addresses.front()[word], 1, 0));
      code_.push_back(BPF_STMT(BPF_RET | BPF_K, kDrop));
      if (is_last(addresses, word))
        code_.push_back(BPF_STMT(BPF_RET | BPF_K, kKeep));
      else
        find(addresses, word + 1);
      return;
    }
    const size_t middle = find_middle(addresses, word);
    code_.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, addresses[middle][word], 0, 1));
    // Conditional jumps reach no further than 255 instructions, so an unconditional one follows.
    const size_t jump = code_.size();
    code_.push_back(BPF_STMT(BPF_JMP | BPF_JA, 0));
    compare(addresses.first(middle), word);
    code_[jump].k = static_cast<uint32_t>(code_.size() - jump - 1);
    compare(addresses.subspan(middle), word);
  }

  // The index nearest to the middle at which the word changes.
  static size_t find_middle(std::span<const Words> addresses, size_t word) {
    const size_t half = addresses.size() / 2;
    size_t after = half, before = half;
    while (after < addresses.size() && addresses[after][word] == addresses[after - 1][word])
      ++after;
    while (before > 0 && addresses[before][word] == addresses[before - 1][word]) --before;
    return before == 0 || (after < addresses.size() && after - half < half - before) ? after
                                                                                     : before;
  }

  const size_t first_;
  const uint32_t last_mask_;
  std::vector<sock_filter> code_;
};

}  // namespace

std::vector<sock_filter> address_filter(int family, const std::vector<std::string>& addresses,
                                        size_t most) {
  std::vector<Words> exact;
  for (const std::string& address : addresses)
    if (std::optional<Words> words = words_of(address, family)) exact.push_back(std::move(*words));
  if (exact.empty()) return {BPF_STMT(BPF_RET | BPF_K, kDrop)};
  const size_t first = family == AF_INET ? offsetof(iphdr, saddr) : offsetof(ip6_hdr, ip6_src);
  for (int widened = 0; widened <= kMostWidened; ++widened) {
    const uint32_t mask = ~0u << widened;
    std::vector<Words> blocks = exact;
    for (Words& words : blocks) words.back() &= mask;
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    SearchProgram program(first, mask);
    program.find(blocks, 0);
    std::vector<sock_filter> code = program.take();
    if (code.size() <= most) return code;
  }
  return {};
}

Status admit_only(int socket, const std::vector<std::string>& addresses) {
  int family = 0;
  socklen_t size = sizeof family;
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 ||
      (family != AF_INET && family != AF_INET6))
    return Status(Code::kUnsupported, "it is no socket of IPv4 or IPv6");
  // The kernel limits the size of the program (net.core.optmem_max: ENOMEM).
  for (size_t most = BPF_MAXINSNS;; most /= 2) {
    std::vector<sock_filter> code = address_filter(family, addresses, most);
    if (code.empty())
      return Status(Code::kUnsupported,
                    std::to_string(addresses.size()) + " addresses are too many for a filter");
    const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
    if (setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0) return {};
    if (errno != ENOMEM)
      return Status(Code::kUnsupported,
                    std::string("the kernel takes no filter: ") + std::strerror(errno));
  }
}

}  // namespace dscomm
