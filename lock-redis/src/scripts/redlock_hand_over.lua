local refused = refusal()
if refused then
    return { 'lost', unpack(refused) }
end
