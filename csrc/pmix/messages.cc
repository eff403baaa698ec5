#include "pmix/messages.h"

namespace dscomm {
std::string pack(const PmixDescription& description) {
  Packer packer;
  packer.text(description.name_space).number(description.own_host).number(description.verbose);
  packer.number(description.hosts.size());
  for (const PmixHost& host : description.hosts) {
    packer.text(host.name).number(host.ranks.size());
    for (uint32_t rank : host.ranks) packer.number(rank);
  }
  packer.number(description.clients.size());
  for (const PmixClient& client : description.clients)
    packer.number(client.rank)
        .number(static_cast<uint64_t>(client.pid))
        .number(client.start_time)
        .number(client.uid)
        .number(client.gid);
  return packer.take();
}

bool unpack(std::string_view text, PmixDescription* description) {
  Unpacker unpacker(text);
  description->name_space = unpacker.text();
  description->own_host = static_cast<uint32_t>(unpacker.number());
  description->verbose = unpacker.number() != 0;
  description->hosts.resize(unpacker.count());
  for (PmixHost& host : description->hosts) {
    host.name = unpacker.text();
    host.ranks.resize(unpacker.count());
    for (uint32_t& rank : host.ranks) rank = static_cast<uint32_t>(unpacker.number());
  }
  description->clients.resize(unpacker.count());
  for (PmixClient& client : description->clients) {
    client.rank = static_cast<uint32_t>(unpacker.number());
    client.pid = static_cast<int64_t>(unpacker.number());
    client.start_time = unpacker.number();
    client.uid = static_cast<uint32_t>(unpacker.number());
    client.gid = static_cast<uint32_t>(unpacker.number());
  }
  return unpacker.whole() && description->own_host < description->hosts.size() &&
         !description->clients.empty();
}

std::string pack(const PmixEnvironments& environments) {
  Packer packer;
  packer.number(environments.own.size());
  for (const std::vector<std::string>& own : environments.own) packer.texts(own);
  return packer.texts(environments.defaults).take();
}

bool unpack(std::string_view text, PmixEnvironments* environments) {
  Unpacker unpacker(text);
  environments->own.resize(unpacker.count());
  for (std::vector<std::string>& own : environments->own) own = unpacker.texts();
  environments->defaults = unpacker.texts();
  return unpacker.whole();
}

std::string pack(const PmixFence& fence) {
  Packer packer;
  packer.number(fence.number).text(fence.name).number(fence.hosts.size());
  for (uint32_t host : fence.hosts) packer.number(host);
  return packer.text(fence.data).take();
}

bool unpack(std::string_view text, PmixFence* fence) {
  Unpacker unpacker(text);
  fence->number = unpacker.number();
  fence->name = unpacker.text();
  fence->hosts.resize(unpacker.count());
  for (uint32_t& host : fence->hosts) host = static_cast<uint32_t>(unpacker.number());
  fence->data = unpacker.text();
  return unpacker.whole();
}

std::string pack(const PmixFenceResult& result) {
  return Packer().number(result.number).number(result.succeeded).text(result.data).take();
}

bool unpack(std::string_view text, PmixFenceResult* result) {
  Unpacker unpacker(text);
  result->number = unpacker.number();
  result->succeeded = unpacker.number() != 0;
  result->data = unpacker.text();
  return unpacker.whole();
}

}  // namespace dscomm
