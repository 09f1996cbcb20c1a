-- Memory in the server's memory: what a step may still keep when `maxmemory` is near.
--
-- A step that has something to keep is refused by a server that is full, before it does anything. Its client then has
-- it done under pressure: history is pruned before its time, and what there is no room for then is not kept: results,
-- tracebacks, and lines of logs. Outcomes are. A large step looks for room also on a server that is not full yet.

do

local NOT_KEPT = '\199\0\13' -- RESULT_NOT_KEPT of job.py
local LARGE = 65536 -- bytes of a step; fewer are kept without a look
local OVERHEAD = 100 -- bytes that whatever is kept takes besides its own
local SHORT = 500 -- bytes of an error that is kept in any case
local ROUNDS, AT_ONCE = 4, 125 -- of pruning early
local FRESH = 5000000 -- microseconds in which somebody who waits for a job comes to look at it

-- Bytes until the server is full, and how many it may use; without a bound nil.
local function left()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then return Memory.pressed and 0 or nil, 0 end -- its user may not ask
  local function fact(name) return tonumber(string.match(info, name .. ':(%d+)') or 0) end
  local most = fact('maxmemory')
  if most == 0 then return nil end
  return most - fact('used_memory') + fact('mem_not_counted_for_evict'), most
end

-- Forget some of the oldest finished jobs, though their time is not over: those without a result first, never one that
-- failed, nor a result that is protected still. How many.
local function prune_early()
  local _, _, _, protect = unpk('>dddd', ARGV[2])
  local many = 0
  for class = 0, 1 do
    local key, gone = B .. ':fin:' .. class, {}
    local ids, spared = call('ZRANGE', key, 0, AT_ONCE - 1), class == 0 and FRESH or protect
    read_ahead(ids)
    for _, id in ipairs(ids) do
      local j = load_job(id)
      if j and j.finished <= now - spared then
        forget(j)
        gone[#gone + 1] = id
      end
    end
    call_all('ZREM', key, gone)
    many = many + #gone
  end
  return many
end

-- Have some room, if pruning early makes it: the thirty-second part of all. Bytes that are left.
local function relieve()
  local bytes, most = left()
  local round = 0
  while bytes and bytes < most / 32 and round < ROUNDS and prune_early() > 0 do
    flush()
    bytes, round = left(), round + 1
  end
  return bytes
end

-- The beginning of a text, in whole characters of UTF-8.
local function cut(text)
  local last = math.min(#text, SHORT)
  while last < #text and last > 0 and bit.band(byte(text, last + 1), 0xC0) == 0x80 do last = last - 1 end
  return sub(text, 1, last)
end

local function size_of_verdict(v) return #v.result + #v.error + #v.traceback end

-- Take from verdicts and notes what there is no room for; `short` says of a verdict that its result is not kept.
function Memory.fit(verdicts, notes)
  local size, bytes = 0, nil
  for _, v in ipairs(verdicts) do size = size + size_of_verdict(v) end
  for _, n in ipairs(notes) do size = size + #n[5] end
  if Memory.pressed and not is_sealed() then
    bytes = relieve()
  elseif Memory.pressed or size > LARGE then
    bytes = left()
  end
  if not bytes then return end
  local function fits(more)
    if bytes < more + OVERHEAD then return false end
    bytes = bytes - more - OVERHEAD
    return true
  end
  for _, v in ipairs(verdicts) do
    if not fits(size_of_verdict(v)) then
      v.error, v.traceback = cut(v.error), ''
      if #v.result > #NOT_KEPT then v.result, v.short = NOT_KEPT, true end
    end
  end
  for _, n in ipairs(notes) do
    if n[5] ~= '' and not fits(#n[5]) then n[5] = '' end
  end
end

-- Whether each was settled, and '2' for those whose result was not kept.
function Memory.mark_not_kept(settled, verdicts)
  for i, v in ipairs(verdicts) do
    if v.short and settled[i] == '1' then settled[i] = '2' end
  end
end

end
